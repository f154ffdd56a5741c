"""Oracle O4: what is emitted has exactly the target's law, jointly, across a step's border.

A toy language of three tokens in which the next depends on the last: P is the target's table, Q
the drafter's. Tens of thousands of slots decode side by side with their own numbers; the counts of
their first K + 2 tokens are held against the chain's exact probabilities.
"""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from mtpbuild.builder.acceptance import MixedAcceptance
from mtpbuild.plugins.accept_rewind import mixed
from mtpbuild.plugins.accept_rewind.distribution import Shaping, draw, shaped_probs
from mtpbuild.plugins.accept_rewind.mixed import Judging

V, K, FIRST, SLOTS = 3, 2, 0, 40_000
P = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.45, 0.1, 0.45]])
Q = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.5, 0.1], [0.3, 0.4, 0.3]])
COUNT = K + 2
# 81 cells: the 99.99 % point of chi-square with 80 degrees of freedom is 135.
LIMIT = 135.0


NUMBERS = torch.rand(SLOTS, 3, 4 * COUNT, generator=torch.Generator().manual_seed(0))


def decode(*, rejection: bool | Tensor, sampled: bool, nextn: int = K) -> Tensor:
    """The first COUNT tokens of every slot, [SLOTS, COUNT], decoded with nextn drafts a step."""
    ones = torch.ones(SLOTS)
    judging = Judging(
        shaping=Shaping(ones, torch.zeros(SLOTS, dtype=torch.int64), ones, 0 * ones),
        rejection=torch.full((SLOTS,), rejection) if isinstance(rejection, bool) else rejection,
        relaxed_topk=torch.ones(SLOTS, dtype=torch.int64),
        relaxed_delta=0 * ones,
        thinking_ids=torch.full((SLOTS, 2), -1),
        uniforms=NUMBERS,
    )
    state = {
        "window": torch.full((SLOTS, nextn + 1), FIRST),
        "num_drafts": torch.zeros(SLOTS, dtype=torch.int64),
        "lengths": torch.zeros(SLOTS, dtype=torch.int64),
        "thinking": torch.zeros(SLOTS, dtype=torch.bool),
        "draft_probs": torch.zeros(SLOTS, nextn, V),
    }
    tokens = torch.full((SLOTS, COUNT + nextn + 1), -1)
    while True:
        active = state["lengths"] < COUNT
        if not active.any():
            return tokens[:, :COUNT]
        acceptance = MixedAcceptance(judging, torch.full((SLOTS,), sampled))
        verdict = acceptance.judge(P[state["window"]].log(), state, active)
        for slot_row in range(nextn + 1):
            rows = (slot_row < verdict.n).nonzero()[:, 0]
            tokens[rows, state["lengths"][rows] + slot_row] = verdict.tokens[rows, slot_row]
        newest = verdict.tokens.gather(1, (verdict.n - 1).clamp(min=0)[:, None])
        window = [torch.where(active[:, None], newest, state["window"][:, :1])]
        for k in range(1, nextn + 1):
            window.append(acceptance.choose(Q[window[-1][:, 0]].log()[:, None], k))
        state |= {
            "window": torch.cat(window, dim=1),
            "num_drafts": torch.full_like(state["num_drafts"], nextn),
            "lengths": verdict.lengths,
            **acceptance.draft_probs(state),
        }


def chi_square(tokens: Tensor) -> float:
    places = [V**i for i in reversed(range(COUNT))]
    counts = np.bincount((tokens.numpy() * places).sum(1), minlength=V**COUNT)
    law = [chain(path) for path in product(range(V), repeat=COUNT)]
    expected = np.array(law) * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


def chain(path: tuple[int, ...]) -> float:
    probability, last = 1.0, FIRST
    for token in path:
        probability *= float(P[last, token])
        last = token
    return probability


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
@pytest.mark.parametrize("rejection", [False, True], ids=["strict", "rejection"])
def test_joint_law(rejection: bool, sampled: bool) -> None:
    assert chi_square(decode(rejection=rejection, sampled=sampled)) < LIMIT


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
def test_joint_law_of_a_mixed_batch(sampled: bool) -> None:
    rejection = torch.arange(SLOTS) % 2 == 0
    tokens = decode(rejection=rejection, sampled=sampled)
    assert chi_square(tokens[rejection]) < LIMIT
    assert chi_square(tokens[~rejection]) < LIMIT


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
def test_strict_text_does_not_depend_on_drafts(sampled: bool) -> None:
    """O2: with the same numbers, what nextn 0 would have sampled, token by token."""
    alone = decode(rejection=False, sampled=False, nextn=0)
    assert torch.equal(decode(rejection=False, sampled=sampled), alone)
    assert torch.equal(decode(rejection=False, sampled=sampled, nextn=4), alone)


def shared_numbers(patch: pytest.MonkeyPatch) -> None:
    """Accepting with the number that the draft was drawn with."""
    patch.setattr(mixed, "ACCEPT", mixed.DRAFT)


def recover_with_the_accepting_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mixed, "RECOVER", mixed.ACCEPT)


def recover_from_p(patch: pytest.MonkeyPatch) -> None:
    """No residual: the rejected draft's mass is counted twice."""

    def wrong(law: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        return draw(P[FIRST].expand_as(law), number)

    patch.setitem(vars(mixed), "draw", wrong)


def q_for_p(patch: pytest.MonkeyPatch) -> None:
    def wrong(logits: Tensor, shaping: Shaping) -> Tensor:
        return shaped_probs(torch.roll(logits, 1, dims=-1), shaping)

    patch.setitem(vars(mixed), "shaped_probs", wrong)


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    shared_numbers,
    recover_with_the_accepting_number,
    recover_from_p,
    q_for_p,
]


@pytest.mark.parametrize("bug", BUGS, ids=[bug.__name__ for bug in BUGS])
def test_the_oracle_catches(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert chi_square(decode(rejection=True, sampled=True)) > 2 * LIMIT


def test_numbers_keyed_by_row_break_the_joint_law() -> None:
    """Each step's rows drawing the same numbers again keeps every marginal and breaks the joint."""
    keyed = MixedAcceptance.judge

    def wrong(
        self: MixedAcceptance, logits: Tensor, state: dict[str, Tensor], active: Tensor
    ) -> object:
        lengths = state["lengths"]
        verdict = keyed(self, logits, state | {"lengths": torch.zeros_like(lengths)}, active)
        self.lengths = torch.zeros_like(lengths)
        return mixed.Verdict(**{**vars(verdict), "lengths": lengths + verdict.n})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixedAcceptance, "judge", wrong)
        assert chi_square(decode(rejection=True, sampled=True)) > 2 * LIMIT
