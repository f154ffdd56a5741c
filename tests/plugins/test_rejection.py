"""Oracle O4: what is emitted has exactly the target's law, jointly, across a step's border.

The language, its drafter and the exact probabilities are those of `tests/support/chain.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtpbuild.builder.program import accept
from mtpbuild.builder.program.accept import MixedAcceptance
from mtpbuild.plugins import draw, shaped_probs
from mtpbuild.plugins.accept_mixed import op as mixed
from mtpbuild.plugins.accept_mixed.op import RuleInputs
from mtpbuild.plugins.block_verification import verify_block
from mtpbuild.plugins.control_tensors import Controls
from mtpbuild.runtime.contract.controls import ACCEPT, DRAFT
from mtpbuild.runtime.contract.rules import Rule
from tests.support import chain as language
from tests.support.chain import FIRST, LIMIT, SLOTS, K, P, V, chi_square, decode, draft_by_block
from tests.support.kernels import asked_of
from tests.support.thrifty import THRIFTY

FULL = pytest.mark.full


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
@pytest.mark.parametrize("rejection", [False, True], ids=["strict", "rejection"])
def test_joint_law(rejection: bool, sampled: bool) -> None:
    assert chi_square(decode(rejection=rejection, sampled=sampled)) < LIMIT


@pytest.mark.parametrize("nextn", [K, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 4))])
@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
def test_joint_law_of_block_verification(sampled: bool, nextn: int) -> None:
    tokens = decode(rejection=True, block=True, sampled=sampled, nextn=nextn)
    assert chi_square(tokens) < LIMIT


BLOCK_DRAFTERS = {
    "dspark": partial(draft_by_block, markov=True), "dflash": partial(draft_by_block, markov=False)
}  # fmt: skip
OTHERS = [pytest.param(mode, marks=FULL) for mode in ("argmax", "block", "strict")]
MODES: dict[str, dict[str, Any]] = {
    "rejection": {"rejection": True, "sampled": True},
    "argmax": {"rejection": True, "sampled": False},
    "block": {"rejection": True, "block": True, "sampled": True},
    "strict": {"rejection": False, "sampled": True},
}


@pytest.mark.parametrize("mode", ["rejection", *OTHERS])
@pytest.mark.parametrize("head", BLOCK_DRAFTERS)
def test_joint_law_of_block_heads(head: str, mode: str) -> None:
    """DFlash's and DSpark's drafts come in one pass; each of DSpark's is given the one before."""
    tokens = decode(**MODES[mode], nextn=4, drafter=BLOCK_DRAFTERS[head])
    assert chi_square(tokens) < LIMIT


@pytest.mark.parametrize("mode", ["rejection", pytest.param("block", marks=FULL)])
@pytest.mark.parametrize("head", BLOCK_DRAFTERS)
def test_the_law_needs_each_drafts_own(
    head: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the block's first place for all."""
    choose = MixedAcceptance.choose

    def wrong(self: MixedAcceptance, logits: Tensor, k: int) -> Tensor:
        draft = choose(self, logits, k)
        self.probs[-1] = self.probs[0]
        return draft

    monkeypatch.setattr(MixedAcceptance, "choose", wrong)
    tokens = decode(**MODES[mode], nextn=4, drafter=BLOCK_DRAFTERS[head])
    assert chi_square(tokens) > 1.5 * LIMIT


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
def test_joint_law_of_a_mixed_batch(sampled: bool) -> None:
    mode = torch.arange(SLOTS) % 3
    tokens = decode(rejection=mode > 0, block=mode == 2, sampled=sampled)
    for each in range(3):
        assert chi_square(tokens[mode == each]) < LIMIT


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.full), 0.6])
def test_joint_law_of_a_rule_that_chooses(share: float, sampled: bool) -> None:
    """The rule is another package's: half of the slots ask for it, the others are strict."""
    assert chi_square(thrifty_tokens(THRIFTY, share, sampled)) < LIMIT


def thrifty_tokens(rule: Rule, share: float, sampled: bool) -> Tensor:
    """Return what the slots say that ask for the rule; the others must say what strict ones do."""
    asks = {"thrifty": torch.arange(SLOTS) % 2 == 0, "thrifty_share": torch.full((SLOTS,), share)}
    tokens = decode(rejection=False, sampled=sampled, rule=rule, asks=asks)
    assert torch.equal(tokens[1::2], decode(rejection=False, sampled=sampled)[1::2])
    return tokens[::2]


def test_the_law_needs_the_rules_own_choice() -> None:
    """A rule that keeps fewer drafts than it may, with the token of strict acceptance after it."""
    assert chi_square(thrifty_tokens(replace(THRIFTY, chooses=None), 0.6, True)) > 1.5 * LIMIT


def test_a_choice_that_can_not_be_gives_way() -> None:
    """To the token of strict acceptance: ids outside the vocabulary, and of probability 0."""
    sure = torch.tensor([[[0.0, 1.0, 0.0]]]).log().expand(1, 2, V)
    window, ones = torch.tensor([[FIRST, 0]]), torch.ones(1, dtype=torch.int64)
    asked = {"thrifty": ones > 0, "thrifty_share": torch.ones(1)}
    for choice in (-1, 0, 2, V):

        def choose(judged: RuleInputs, own: Tensor, token: int = choice) -> tuple[Tensor, Tensor]:
            return 0 * judged.drafts + token, own

        rule = replace(THRIFTY, chooses=choose)
        slots = (window, ones, ones, ones > 0, ones > 1, torch.ones(1, 1, V) / V)
        verdict = mixed.accept_mixed(
            sure, *slots, asked_of(1, 1, uniforms=torch.rand(1, 3, 9)) | asked, rules=(rule,)
        )
        assert verdict.tokens.tolist() == [[1, -1]]


def kept(p: Tensor, q: Tensor, path: tuple[int, ...]) -> tuple[float, float]:
    """Mean number of drafts of a path that are kept: in a block, and one by one."""
    drafts = torch.tensor([[FIRST, *path]])
    rows = drafts[0]
    real = torch.ones(1, len(path), dtype=torch.bool)
    at_least, _ = verify_block(p[rows][None], drafts, q[rows[:-1]][None], real)
    ratios = [min(1.0, float(p[a, b] / q[a, b])) for a, b in pairwise(rows.tolist())]
    return float(at_least.sum()), float(np.cumprod(ratios).sum())


def test_a_block_keeps_more() -> None:
    """The exact mean over the drafter's paths is never less than one by one; here it is more."""
    generator = torch.Generator().manual_seed(1)
    gains = []
    for _ in range(20):
        p, q = (torch.rand(V, V, generator=generator).square() + 1e-3 for _ in range(2))
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        block = alone = 0.0
        for path in product(range(V), repeat=4):
            chance = float(np.prod([q[a, b] for a, b in pairwise((FIRST, *path))]))
            in_block, one_by_one = kept(p, q, path)
            block, alone = block + chance * in_block, alone + chance * one_by_one
        gains.append(block - alone)
    assert min(gains) > -1e-5
    assert max(gains) > 0.02


def test_the_drafts_that_are_the_targets_own_are_all_kept() -> None:
    assert kept(P, P, (0, 1, 2, 0)) == pytest.approx((4.0, 4.0), abs=1e-4)


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
def test_strict_text_does_not_depend_on_drafts(sampled: bool) -> None:
    """O2: with the same numbers, what nextn 0 would have sampled, token by token."""
    alone = decode(rejection=False, sampled=False, nextn=0)
    assert torch.equal(decode(rejection=False, sampled=sampled), alone)
    assert torch.equal(decode(rejection=False, sampled=sampled, nextn=4), alone)


def shared_numbers(patch: pytest.MonkeyPatch) -> None:
    """Accept with the number that the draft was drawn with."""
    patch.setattr(mixed, "ACCEPT", DRAFT)


def recover_with_the_accepting_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mixed, "RECOVER", ACCEPT)


def recover_from_p(patch: pytest.MonkeyPatch) -> None:
    """No residual: the rejected draft's mass is counted twice."""

    def wrong(law: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        return draw(P[FIRST].expand_as(law), number)

    patch.setitem(vars(mixed), "draw", wrong)


def block_residual_without_weight(patch: pytest.MonkeyPatch) -> None:
    """Return the plain residual behind a block."""

    def wrong(
        p: Tensor, window: Tensor, draft_probs: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor]:
        at_least, _ = verify_block(p, window, draft_probs, real)
        return at_least, p[:, : real.shape[1]] - draft_probs

    patch.setitem(vars(mixed), "verify_block", wrong)
    # A drafter so far off that blocks often end at a weight below 1.
    patch.setattr(
        language, "Q", torch.tensor([[0.04, 0.92, 0.04], [0.92, 0.04, 0.04], [0.04, 0.92, 0.04]])
    )


def block_drafts_with_seen_numbers(patch: pytest.MonkeyPatch) -> None:
    """Accept with a dropped draft's number again, though the block's verdict depended on it."""

    def wrong(asked: Controls, lengths: Tensor, k: int) -> Tensor:
        return asked["uniforms"][:, DRAFT].gather(1, lengths[:, None] + k)

    patch.setitem(vars(accept), "draft_number", wrong)


def block_judged_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Return the block's residual behind drafts that were judged alone."""

    def wrong(
        p: Tensor, window: Tensor, draft_probs: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, rest = verify_block(p, window, draft_probs, real)
        drafts = window[:, 1:, None]
        ratio = p[:, : real.shape[1]].gather(-1, drafts) / draft_probs.gather(-1, drafts)
        return (ratio[..., 0].clamp(max=1) * real).cumprod(-1), rest

    patch.setitem(vars(mixed), "verify_block", wrong)


def q_for_p(patch: pytest.MonkeyPatch) -> None:
    def wrong(logits: Tensor, *shaping: Tensor) -> Tensor:
        return shaped_probs(torch.roll(logits, 1, dims=-1), *shaping)

    patch.setitem(vars(mixed), "shaped_probs", wrong)


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    shared_numbers,
    recover_with_the_accepting_number,
    recover_from_p,
    q_for_p,
    block_residual_without_weight,
    block_drafts_with_seen_numbers,
    block_judged_one_by_one,
]


@pytest.mark.parametrize("bug", BUGS, ids=[bug.__name__ for bug in BUGS])
def test_the_oracle_catches(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    block = bug.__name__.startswith("block")
    tokens = decode(rejection=True, sampled=True, block=block, nextn=4 if block else K)
    assert chi_square(tokens) > 1.5 * LIMIT


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
