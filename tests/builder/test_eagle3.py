"""EAGLE-3 heads in three dialects: every step's drafts against a recompute, and planted faults."""

import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.models.common.weight import convert_weights, join_slices
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.recipe import FoundModel
from mtpbuild.builder.program.opened_model import open_model
from mtpbuild.builder.weights.head import open_head, read_head_config
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.errors import CheckpointError, UsageError
from tests.reference.eager import EagerPrograms
from tests.reference.eagle3 import LAYER, TAPS, PlainEagle3, make_head
from tests.support.eagle3_gguf import write_gguf_head
from tests.support.families import make_family, save_family
from tests.support.invoke import refusal
from tests.support.opened import NO_IDS
from tests.support.requests import build, build_request
from tests.support.steps import CHUNK, check_steps

Change = dict[str, Any]
# What a head's values are, whether it has an embedding of its own, and how its maker writes them.
DIALECTS: dict[str, tuple[Change, bool, str]] = {
    "eagle": ({TAPS: [0, 1, 2], "draft_vocab_size": 45}, False, "midlayer"),
    "own embedding": ({TAPS: [0, 1, 2], "draft_vocab_size": 56}, True, "midlayer"),
    "specforge": ({TAPS: [1], "norm_before_fc": True}, True, "midlayer"),
    "speculators": (
        {TAPS: [0, 2, 1], "norm_before_residual": True, "norm_output": True, "fc_norm": True,
         "draft_vocab_size": 40},
        False,
        "layers.0",
    ),
    "no taps": (
        {"use_aux_hidden_state": False, TAPS: [], "norm_before_fc": True},
        False,
        "midlayer",
    ),
    "narrow": ({TAPS: [1, 2], "hidden_size": 20, "head_dim": 6, "draft_vocab_size": 50}, True,
               "midlayer"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def save_head(
    folder: Path, dialect: str, trunk: PlainCausalLM
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a head as its maker does; return its values and its weights by plain names."""
    changes, embeds, _ = DIALECTS[dialect]
    width = trunk.config.hidden_size
    raw = LAYER | {"hidden_size": width, "target_hidden_size": width} | changes
    weights = make_head(trunk, raw, embeds)
    folder.mkdir(parents=True)
    save_weights(folder, dialect, weights)
    stored: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], **raw}
    if dialect == "speculators":
        layer = {name: raw[name] for name in LAYER}
        own = {name: value for name, value in raw.items() if name not in LAYER}
        stored = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, **own}
    if dialect == "no taps":
        stored["eagle_config"] = {"use_aux_hidden_state": stored.pop("use_aux_hidden_state")}
    (folder / "config.json").write_text(json.dumps(stored))
    return raw, weights


def save_weights(folder: Path, dialect: str, weights: dict[str, Tensor]) -> None:
    prefix = DIALECTS[dialect][2]
    named = {name.replace("layers.0", prefix): weight for name, weight in weights.items()}
    if "d2t" in weights:
        named["t2d"] = torch.zeros(LAYER["vocab_size"], dtype=torch.bool)
    save_file(named, folder / "model.safetensors")


def load_with_head(
    place: Path, name: str, dialect: str, train: Callable[[PlainEagle3], None] | None = None
) -> tuple[CausalLM, PlainEagle3]:
    """Return the program's model of a trunk with a head, and the plain one."""
    trunk = make_family(name)
    folder = save_family(place / name, name, trunk)
    raw, weights = save_head(place / "head", dialect, trunk)
    config = read_head_config(place / "head", folder, load_config(folder))
    plain = PlainEagle3(trunk, config, raw, weights)
    if train is not None:
        train(plain)
        save_weights(place / "head", dialect, weights)
    model = open_model(
        FoundModel("x", "x", folder, place / "head"),
        config,
        NO_IDS,
        GraphStyle(),
        draft_ids=config.draft_ids,
    )
    program = model.model
    values = dict(join_slices(convert_weights(model.checkpoint, model.table)))
    program.load_state_dict(values, assign=True, strict=True)
    return program.eval(), plain


@pytest.mark.parametrize("dialect", ["eagle", "specforge", "narrow"])
def test_a_gguf_head_is_the_one_that_it_was_made_from(dialect: str, tmp_path: Path) -> None:
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    raw, weights = save_head(tmp_path / "head", dialect, trunk)
    raw["rms_norm_eps"] = 2**-17  # a file has it in fp32
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 2**-17}))
    file = write_gguf_head(tmp_path / "head.gguf", raw, weights)
    config = load_config(folder)
    first, second = (read_head_config(p, folder, config) for p in (tmp_path / "head", file))
    assert first == second
    wanted, read = (open_head(place, config) for place in (tmp_path / "head", file))
    assert wanted.tensors.keys() == read.tensors.keys()
    for name in wanted.tensors:
        assert torch.equal(wanted.read(name), read.read(name)), name


def test_other_gguf_files_are_no_head(tmp_path: Path) -> None:
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    line = refusal("build", "--model", folder, "--mtp", tmp_path / "a.gguf", code=1)
    assert line.startswith(f"--mtp {tmp_path / 'a.gguf'}: architecture llama: only eagle3,")


TRUNKS = [("qwen3", dialect) for dialect in DIALECTS]
TRUNKS += [("llama", "eagle"), ("qwen3.5", "speculators"), ("gigachat", "eagle")]


@pytest.mark.parametrize(("name", "dialect"), TRUNKS)
def test_drafts_are_those_of_a_recompute(name: str, dialect: str, tmp_path: Path) -> None:
    model, reference = load_with_head(tmp_path, name, dialect)
    plan = Plan(reference.config, 3, "mtp-eagle", 1, 200, CHUNK, draft_ids=model.config.draft_ids)
    check_steps(plan, model, reference, accepts_all=False)


def train_head(reference: PlainEagle3, steps: int = 300) -> None:
    """Train a head on what its trunk says, so that its drafts are often right.

    It knows the newest token by its taps alone, as its own embedding is zero.
    """
    trunk, weights = reference.trunk[0].requires_grad_(False), reference.weights
    weights["embed_tokens.weight"].zero_()
    rest = weights.keys() - {"d2t", "embed_tokens.weight"}
    trained = [weights[name].requires_grad_() for name in sorted(rest)]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    torch.manual_seed(0)
    for _ in range(steps):
        tokens = torch.randint(reference.config.vocab_size, (16, 2))
        for _ in range(12):
            tokens = torch.cat([tokens, trunk.logits(trunk.main(tokens))[:, -1:].argmax(-1)], dim=1)
        hidden, loss = reference.main(tokens), torch.zeros(())
        for j in range(1, 4):
            hidden = reference.mtp(1, tokens[:, j:], hidden[:, : tokens.shape[1] - j])
            logits, wanted = reference.draft_logits(1, hidden[:, :-1]), tokens[:, j + 1 :, None]
            losses = -logits.log_softmax(-1).gather(-1, wanted)
            loss = loss + losses[losses < 1e20].mean()  # the others can't be drafted
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for weight in trained:
        weight.requires_grad_(False)


def count_accepted(model: CausalLM, plan: Plan) -> Tensor:
    """Return the share of steps that accept so many drafts and more, for 1 to nextn."""
    programs, rng = EagerPrograms(plan, model), np.random.default_rng(0)
    counts = list[int]()
    for _ in range(16):
        prompt = rng.integers(0, model.config.vocab_size, 4)
        programs.prefill(0, 0, prompt[:3])
        programs.begin(0, 3, int(prompt[-1]))
        counts += [
            int(programs.step(np.array([True]), plan.capacity).num_tokens[0]) for _ in range(12)
        ]
    accepted = torch.tensor(counts)[:, None] - 1
    return (accepted >= torch.arange(1, plan.nextn + 1)).float().mean(0)


def shift_taps(model: CausalLM) -> None:
    model.taps = tuple(min(tap + 1, 2) for tap in model.taps)


def flip_residual(model: CausalLM) -> None:
    head: Any = model.module(0)
    head.config = replace(head.config, norm_before_residual=not head.config.norm_before_residual)


def take_ids_for_differences(model: CausalLM) -> None:
    ids = model.draft_ids
    model.draft_ids = ids - torch.arange(len(ids))


def recycle_normed(model: CausalLM) -> None:
    head: Any = model.module(0)
    head.config = replace(head.config, norm_output=not head.config.norm_output)


# The first draft that is accepted less often, of a head that is often right.
FAULTS = {shift_taps: 0, flip_residual: 0, take_ids_for_differences: 0, recycle_normed: 1}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: Callable[[CausalLM], None], tmp_path: Path) -> None:
    model, reference = load_with_head(tmp_path, "qwen3", "eagle")
    fault(model)
    plan = Plan(reference.config, 3, "mtp-eagle", 1, 200, CHUNK, draft_ids=model.config.draft_ids)
    with pytest.raises(AssertionError, match="drafts differ"):
        check_steps(plan, model, reference, accepts_all=False)


@pytest.mark.full
def test_planted_faults_cost_acceptance(tmp_path: Path) -> None:
    model, reference = load_with_head(tmp_path, "qwen3", "own embedding", train_head)
    plan = Plan(reference.config, 3, "mtp-eagle", 1, 200, 4, draft_ids=model.config.draft_ids)
    usual = count_accepted(model, plan)
    assert usual[0] > 0.6
    for fault, first in FAULTS.items():
        fault(faulty := deepcopy(model))
        less = usual - count_accepted(faulty, plan)
        assert less[first] > 0.04, fault.__name__
        assert less.sum() > 0.1, fault.__name__


REFUSALS = [
    (("--tp", "2", "--target", "inductor"), "--tp 2: an engine with an EAGLE-3 head has one rank"),
    (("--drafter", "mtp-vanilla"), "--drafter mtp-vanilla: an EAGLE-3 head drafts by mtp-eagle"),
    (("--draft-vocab", "9"), "--draft-vocab: an EAGLE-3 head has its own draft vocabulary"),
    (("--layers", "0-0"), "--layers 0-0: an EAGLE-3 head reads layers of the whole model"),
    (("--target", "tensorrt"), "has no GPU kernel yet: build for the CPU"),
]


@pytest.mark.parametrize(("flags", "why"), REFUSALS)
def test_refusals(flags: tuple[str, ...], why: str, tmp_path: Path) -> None:
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    save_head(tmp_path / "head", "eagle", trunk)
    command = ("build", "--model", folder, "--nextn", 1, "--mtp", tmp_path / "head", "--dry-run")
    assert why in refusal(*command, *flags)


BAD: list[tuple[Change, str]] = [
    ({"hidden_size": 20}, "hidden_size 20 is not the trunk's 24, so it needs its own embed_tokens"),
    ({"target_hidden_size": 99}, "its trunk has hidden_size 99, the model 24"),
    ({"vocab_size": 62}, "its trunk has vocab_size 62, the model 61: this head is another model's"),
    ({TAPS: [0, 1, 7]}, "[0, 1, 7]: the trunk has 2 layers"),
    ({TAPS: "all"}, "must be a list of layers, not 'all'"),
    ({"draft_vocab_size": 44}, "d2t does not name 44 tokens"),
    ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported; supported: 1"),
    ({"layer_types": 5, "num_hidden_layers": 3}, "num_hidden_layers 3 is not supported"),
    ({"layer_types": ["sliding_attention"]}, "a head with a sliding window is not supported"),
]


@pytest.mark.parametrize(("changes", "why"), BAD)
def test_heads_that_do_not_fit(changes: Change, why: str, tmp_path: Path) -> None:
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    save_head(tmp_path / "head", "eagle", trunk)
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=re.escape(why)):
        read_head_config(tmp_path / "head", folder, load_config(folder))


@pytest.mark.full
@pytest.mark.parametrize(("name", "dialect"), [("qwen3", "eagle"), ("qwen3.5", "speculators")])
def test_engines_are_exact(name: str, dialect: str, tmp_path: Path) -> None:
    """With int8 weights and caches all that is said is, to the bit, what is said without drafts."""
    sizes = {"hidden_size": 64}
    trunk = make_family(name, **sizes)
    folder = save_family(tmp_path / name, name, trunk, **sizes)
    save_head(tmp_path / "head", dialect, trunk)
    said = []
    for nextn, mtp in ((0, None), (3, tmp_path / "head")):
        out = tmp_path / f"n{nextn}"
        how = {"weights": "int8", "cache_dtype": "int8", "mtp": mtp, "out": out}
        build(build_request(folder, (nextn,), **how))
        with Engine.load(out, prefix_cache=False) as engine:
            params = SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True)
            results = [engine.generate([5, 6, 7 + i], params) for i in range(3)]
            said.append([(r.token_ids, r.logprobs) for r in results])
    assert said[0] == said[1]
    with pytest.raises(UsageError, match="an EAGLE-3 head is not refitted: build the engine anew"):
        refit(tmp_path / "n3", str(folder), mtp=tmp_path / "head")
