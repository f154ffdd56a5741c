"""Decodes, with the step program, a toy language of three tokens: the next depends on the last.

P is the target's table, Q the drafter's. Tens of thousands of slots decode side by side, each with
its own random numbers; the counts of their first K + 2 tokens are compared with the exact
probabilities.
"""

from collections.abc import Callable, Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mtpbuild.builder.models.common.block_head import BlockHead
from mtpbuild.builder.models.common.layers import Positions, State
from mtpbuild.builder.program.accept import MixedAcceptance
from mtpbuild.builder.program.draft import AcceptedTokens, BlockDrafter
from mtpbuild.runtime.contract.controls import GREEDY, HISTORY, StepControls
from mtpbuild.runtime.contract.rules import Rule
from tests.reference.sampling import edited
from tests.support.kernels import asked_of, asked_of_penalties

V, K, FIRST, SLOTS = 3, 2, 0, 40_000
P = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.45, 0.1, 0.45]])
Q = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.5, 0.1], [0.3, 0.4, 0.3]])
COUNT = K + 2
# 81 cells: the 99.99 % point of chi-square with 80 degrees of freedom is 135.
LIMIT = 135.0


# Three streams of random numbers, and drafts 2 .. 4 of a block.
NUMBERS = torch.rand(SLOTS, 6, 4 * COUNT, generator=torch.Generator().manual_seed(0))


ChainDrafter = Callable[[MixedAcceptance, Tensor, int], Tensor]


def draft_by_last(mode: MixedAcceptance, newest: Tensor, nextn: int) -> Tensor:
    """Draft [slots, nextn] after the newest tokens [slots, 1], each by Q of the one before."""
    drafts = [newest]
    for k in range(1, nextn + 1):
        drafts.append(mode.choose(Q[drafts[-1][:, 0]].log()[:, None], k))
    return torch.cat(drafts[1:], dim=1)


class PlacesHead(BlockHead):
    """A block head of this language: its layers only tell the newest token and masks apart."""

    def write(self, context: Tensor, state: State, rows: Positions) -> State:
        return {}

    def forward(self, x: Tensor, state: State, rows: Positions) -> Tensor:
        return x


def draft_by_block(mode: MixedAcceptance, newest: Tensor, nextn: int, markov: bool) -> Tensor:
    """Draft by the program's block drafter, with DSpark's bias or, as DFlash, without.

    Q of the newest token or of a mask, and the place, make the logits before the bias.
    """
    raw: Any = SimpleNamespace(
        hidden_size=V, rms_norm_eps=1e-6, taps=(0,), markov_rank=2 * markov, vocab_size=V,
        from_anchor=markov, mask_token_id=V, added_width=V,
    )  # fmt: skip
    head, generator = PlacesHead(raw), torch.Generator().manual_seed(3)
    for weight in (head.markov_w1, head.markov_w2) if markov else ():
        weight.data = 1.2 * torch.randn(weight.shape, generator=generator)
    table = torch.cat([Q, torch.full((1, V), 1 / V)]).log()
    places = torch.randn(nextn, V, generator=generator)
    model: Any = SimpleNamespace(
        mtp=[head], place_drafts=lambda rows: rows, draft_rope=lambda *_: None,
        embed=lambda tokens: table[tokens], draft_logits=lambda _, x: x + places,
        head=lambda x, weight, _: x @ weight,
    )  # fmt: skip
    ones: Any = torch.ones(len(newest), dtype=torch.int64)
    hidden, rows, draft = torch.zeros(len(newest), 1, V), cast(Any, None), cast(Any, None)
    lengths, choose = mode.lengths, mode.choose
    assert lengths is not None
    with torch.no_grad():
        step = AcceptedTokens(hidden, newest, ones, lengths, ones > 0, rows, choose, draft)
        return BlockDrafter(nextn)(model, {}, step)[0]


def decode(
    *,
    rejection: bool | Tensor,
    sampled: bool,
    nextn: int = K,
    block: bool | Tensor = False,
    penalties: StepControls | None = None,
    slots: int = SLOTS,
    rule: Rule | None = None,
    asks: Mapping[str, Tensor] | None = None,
    drafter: ChainDrafter = draft_by_last,
) -> Tensor:
    """Decode the first COUNT tokens of every slot, [slots, COUNT], with nextn drafts per step.

    penalties: edits the logits of all slots, whose prompt is the token FIRST. rule: another
    package's; asks: which slots ask for it, and its settings, by the names of its controls.
    """
    asked = asked_of(
        slots,
        nextn,
        temperature=torch.ones(slots),
        rejection=torch.full((slots,), rejection) if isinstance(rejection, bool) else rejection,
        block=torch.full((slots,), block) if isinstance(block, bool) else block,
        sampled_drafts=torch.full((slots,), sampled),
        uniforms=NUMBERS[:slots],
    )
    state = {
        "window": torch.full((slots, nextn + 1), FIRST),
        "num_drafts": torch.zeros(slots, dtype=torch.int64),
        "lengths": torch.zeros(slots, dtype=torch.int64),
        "thinking": torch.zeros(slots, dtype=torch.bool),
        "draft_probs": torch.zeros(slots, nextn, V),
    }
    if penalties is not None:
        asked |= asked_of_penalties(slots, penalties)
        # The prompt is in the window; the remains of a slot's last request are random.
        left = torch.Generator().manual_seed(2)
        state[HISTORY] = torch.randint(0, V, (slots, 4 * COUNT), generator=left)
    tokens = torch.full((slots, COUNT + nextn + 1), -1)
    while True:
        active = state["lengths"] < COUNT
        if not active.any():
            return tokens[:, :COUNT]
        mode = MixedAcceptance({**asked, **(asks or {})}, rules=() if rule is None else (rule,))
        verdict = mode.judge(P[state["window"]].log(), state, active)
        for slot_row in range(nextn + 1):
            rows = (slot_row < verdict.n).nonzero()[:, 0]
            tokens[rows, state["lengths"][rows] + slot_row] = verdict.tokens[rows, slot_row]
        newest = verdict.tokens.gather(1, (verdict.n - 1).clamp(min=0)[:, None])
        newest = torch.where(active[:, None], newest, state["window"][:, :1])
        drafts = drafter(mode, newest, nextn) if nextn else newest[:, :0]
        state |= {
            "window": torch.cat([newest, drafts], dim=1),
            "num_drafts": torch.full_like(state["num_drafts"], nextn),
            "lengths": verdict.lengths,
            **mode.draft_probs(state),
            **mode.history(state),
        }


def chi_square(tokens: Tensor, penalties: StepControls = GREEDY) -> float:
    places = [V**i for i in reversed(range(COUNT))]
    counts = np.bincount((tokens.numpy() * places).sum(1), minlength=V**COUNT)
    law = [chain(path, penalties) for path in product(range(V), repeat=COUNT)]
    expected = np.array(law) * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


def chain(path: tuple[int, ...], penalties: StepControls = GREEDY) -> float:
    """Return the exact probability of the tokens after the prompt."""
    probability, tokens = 1.0, [FIRST]
    for token in path:
        logits = edited(P[tokens[-1]].log().double().numpy(), tokens, 1, penalties)
        probability *= float(np.exp(logits[token]) / np.exp(logits).sum())
        tokens.append(token)
    return probability
