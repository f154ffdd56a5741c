"""Faults in what a head reads leave texts right; acceptance by position shows each of them.

Every family with modules or a head has learnt a text (tests/support/taught.py) of which it drafts
nearly all.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import DraftLayer
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.plugins import take_rows
from tests.reference.eager import EagerPrograms
from tests.reference.eagle3 import PlainEagle3
from tests.support.checkpoints import SHAPES, lower, make_predictable
from tests.support.deepseek_v4 import save
from tests.support.eagle3 import load_with_head
from tests.support.families import CHOOSERS, WITH_MODULES, make_family
from tests.support.gemma4 import (
    make_assistant,
    make_trunk,
    open_saved,
    place_one_off,
    read_unnormed,
)
from tests.support.taught import (
    LENGTH,
    teach,
    teach_assistant,
    teach_head,
    teach_trunk,
    write_texts,
)

NEXTN, SLOTS, PROMPT = 2, 48, 4
FULL = pytest.mark.full


def teach_family(plain: Any) -> CausalLM:
    """Teach a plain model with modules; return the program's."""
    names, E = plain.config.module_names, plain.config.hidden_size
    weight = plain.module(1).get_parameter(f"{names.input_proj}.weight")
    halves = weight.detach().split(E, dim=1)
    token, state = halves[::-1] if plain.config.mtp.hidden_first else halves
    teach(plain, token, state, plain.module(1).get_parameter(f"{names.hidden_norm}.weight"))
    return lower(plain)


def teach_any(name: str, place: Path, **changes: Any) -> CausalLM:
    return teach_family(make_family(name, **changes))


def teach_chooser(name: str, place: Path) -> CausalLM:
    """Teach a model whose attention reads chosen rows; of these texts it chooses all."""
    return teach_any(name, place, index_topk=LENGTH + 8)


def teach_deepseek_v4(place: Path) -> CausalLM:
    save(place)
    config, checkpoint = load_config(place), open_checkpoint(place)
    plain: Any = find_family_of(config).reference(config)
    plain.load_state_dict({name: checkpoint.read(name) for name in plain.state_dict()})
    module = plain.module(1)
    columns = (module.e_proj.weight.detach(), module.h_proj.weight.detach())
    teach(plain, *columns, module.hnorm.weight)
    return lower(plain)


def teach_eagle3(place: Path) -> CausalLM:
    def train(plain: PlainEagle3) -> None:
        torch.manual_seed(5)
        embedding, hidden = teach_trunk(plain.trunk[0])
        weights = plain.weights
        weights["embed_tokens.weight"].copy_(embedding * (1 - hidden))
        weights["layers.0.hidden_norm.weight"].uniform_(-2, 2).exp_()
        fixed = "embed_tokens.weight", "layers.0.hidden_norm.weight"
        teach_head(plain, (weights[name] for name in sorted(weights.keys() - {*fixed})))

    return load_with_head(place, "qwen3", "specforge", train)[0]


def teach_gemma4(place: Path) -> CausalLM:
    trunk, head = make_trunk("dense"), make_assistant("dense")
    teach_assistant(trunk, head)
    return open_saved(trunk, head, place)


def run(model: CausalLM) -> tuple[Tensor, list[list[int]]]:
    """Return the share of steps that accept 1 draft and more, 2 and more, and all texts."""
    drafter = "mtp-eagle" if isinstance(model.mtp[0], DraftLayer) else "mtp-assistant"
    plan = Plan(model.config, NEXTN, drafter, SLOTS, 64, 16)
    programs, texts, counts = EagerPrograms(plan, model), [list[int]() for _ in range(SLOTS)], []
    torch.manual_seed(9)
    for slot, prompt in enumerate(write_texts(SLOTS, PROMPT).numpy()):
        programs.prefill(slot, 0, prompt[: PROMPT - 1 + programs.lookahead])
        programs.begin(slot, PROMPT - 1, int(prompt[-1]))
    for _ in range(4):
        out = programs.step(np.ones(SLOTS, bool), plan.capacity)
        counts.append(torch.from_numpy(out.num_tokens) - 1)
        for text, tokens, count in zip(texts, out.tokens, out.num_tokens, strict=True):
            text += tokens[:count].tolist()
    accepted = torch.cat(counts[1:])[:, None] >= torch.arange(1, NEXTN + 1)
    return accepted.float().mean(0), texts


def wrap_input(model: CausalLM, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    join: Any = model.draft_input

    def wrong(j: int, tokens: Tensor, hidden: Tensor, rows: Any) -> Tensor:
        joined: Tensor = join(j, *change(tokens, hidden), rows)
        return joined

    model.draft_input = wrong  # type: ignore[method-assign]


def delay(x: Tensor) -> Tensor:
    """Move a window by one token; single tokens stay."""
    return x if x.shape[1] == 1 else x.roll(1, 1)


def take_token_before(model: CausalLM) -> None:
    wrap_input(model, lambda tokens, hidden: (delay(tokens), hidden))


def take_row_before(model: CausalLM) -> None:
    wrap_input(model, lambda tokens, hidden: (tokens, delay(hidden)))


def leave_norm_out(model: CausalLM) -> None:
    module = model.module(0)
    names = ("hnorm", "input_layernorm.hidden")
    name = next(name for name in names if name in dict(module.named_modules()))
    module.set_submodule(name, nn.Identity())


def place_drafts_one_off(model: CausalLM) -> None:
    rope: Any = model.draft_rope
    place = rope.forward

    def wrong(start: Tensor, tokens: int, *how: Any, offset: int = 0) -> Any:
        rows, later = (place(start, tokens, *how, offset=offset + i) for i in range(2))
        angles = {
            name: getattr(later, name) for name in ("cos", "sin", "far") if hasattr(later, name)
        }
        return replace(rows, **angles) if tokens == 1 else rows

    rope.forward = wrong


def read_trunk_again(model: CausalLM) -> None:
    """Let later drafts read the trunk's hidden state, in place of the module's."""
    module: Any = model.module(0)
    forward_last, kept = module.forward_last, dict[str, Tensor]()

    def keep_row(x: Tensor, cache: Tensor, rows: Any, at: Tensor) -> Any:
        kept["row"] = take_rows(kept["window"], at, 1)
        return forward_last(x, cache, rows, at)

    def change(tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if tokens.shape[1] == 1:
            return tokens, kept["row"]
        kept["window"] = hidden
        return tokens, hidden

    module.forward_last = keep_row
    wrap_input(model, change)


Fault = Callable[[CausalLM], None]
# The first draft, from 0, that is accepted less often.
FAULTS: dict[Fault, int] = {
    take_token_before: 0,
    take_row_before: 0,
    leave_norm_out: 0,
    place_drafts_one_off: 1,
    read_trunk_again: 1,
}


@dataclass
class Window:
    """The newest window of a trunk whose head is Gemma-4's assistant."""

    tokens: Tensor  # [B, T]
    hidden: Tensor  # [B, T, E]
    last: Tensor  # [B] the last accepted token
    drafts: int = 0  # made since

    def take_hidden(self, before: int = 0) -> Tensor:
        return take_rows(self.hidden, (self.last - before).clamp(min=0), 1)


def wrap_head(
    model: Any, change: Callable[[Tensor, Tensor, Window], tuple[Tensor, Tensor]]
) -> None:
    """Change what an assistant reads for a draft: its token's embedding and a hidden state."""
    forward, place_head, run_head = model.forward, model.place_head, model.run_head
    windows = list[Window]()

    def keep_window(tokens: Tensor, *how: Any) -> Any:
        hidden, updates = forward(tokens, *how)
        windows[:] = [Window(tokens, hidden, hidden)]
        return hidden, updates

    def keep_place(rows: Any, lengths: Tensor, last: Tensor, active: Tensor) -> Any:
        windows[0].last = last
        return place_head(rows, lengths, last, active)

    def run_wrongly(embedding: Tensor, hidden: Tensor, rows: Any) -> Any:
        changed = change(embedding, hidden, windows[0])
        windows[0].drafts += 1
        return run_head(*changed, rows)

    model.forward, model.place_head, model.run_head = keep_window, keep_place, run_wrongly


def give_token_before(model: CausalLM) -> None:
    def change(embedding: Tensor, hidden: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        before = model.embed(window.tokens.gather(1, window.last[:, None]))
        return embedding if window.drafts else before, hidden

    wrap_head(model, change)


def give_row_before(model: CausalLM) -> None:
    def change(embedding: Tensor, hidden: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        return embedding, hidden if window.drafts else window.take_hidden(before=1)

    wrap_head(model, change)


def give_trunks_row_again(model: CausalLM) -> None:
    def change(embedding: Tensor, hidden: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        return embedding, window.take_hidden()

    wrap_head(model, change)


HEAD_FAULTS: dict[Fault, int] = {
    give_token_before: 0,
    give_row_before: 0,
    read_unnormed: 0,
    place_one_off: 0,
    give_trunks_row_again: 1,
}
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
CASES: dict[str, Callable[[Path], CausalLM]] = {
    "small mimo": lambda place: teach_family(make_family("mimo", **SMALL)),
    "deepseek-v3": lambda place: teach_family(make_predictable(**SHAPES["yarn-three-modules"])),
    "deepseek-v4": teach_deepseek_v4,
    "eagle3": teach_eagle3,
    "gemma4": teach_gemma4,
    **{
        name: partial(teach_chooser if name in CHOOSERS else teach_any, name)
        for name in WITH_MODULES
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "small mimo" else FULL) for name in CASES]
)
def test_each_fault_costs_drafts_alone(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = CASES[name](tmp_path)
    usual, texts = run(model)
    assert usual.min() > 0.9
    for fault, first in (HEAD_FAULTS if name == "gemma4" else FAULTS).items():
        fault(faulty := deepcopy(model))
        accepted, others = run(faulty)
        for text, other in zip(texts, others, strict=True):
            length = min(map(len, (text, other)))
            assert text[:length] == other[:length], fault.__name__
        less = usual - accepted
        assert less[first:].max() > 0.2, f"{fault.__name__} is not seen"
        assert less[:first].sum() < 0.05, fault.__name__
