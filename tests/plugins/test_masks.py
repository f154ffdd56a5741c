"""What a grammar forbids: the bits of its masks, and the distribution of tokens under them.

The second half is oracle O4 with a grammar: a toy language of three tokens, in which P is the
target's table, Q the drafter's and AFTER says which tokens may follow which. What is emitted must
have P's law among the allowed tokens, whatever the host puts in the place of drafts.
"""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtpbuild.builder.program.accept import MixedAcceptance
from mtpbuild.plugins.accept_mixed.op import accept_mixed
from mtpbuild.plugins.logit_edits import without_forbidden
from mtpbuild.runtime.constraints.grammar import GrammarMatcher
from mtpbuild.runtime.contract.controls import GREEDY, WORD
from mtpbuild.runtime.contract.programs import Constraint
from tests.support.kernels import asked_of, random_mixed

V, K, FIRST, SLOTS, COUNT = 3, 2, 0, 40_000, 4
P = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.45, 0.1, 0.45]])
Q = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.5, 0.1], [0.3, 0.4, 0.3]])
AFTER = [{0, 1, 2}, {2}, {0, 1}]
NUMBERS = torch.rand(SLOTS, 6, 4 * COUNT, generator=torch.Generator().manual_seed(0))
LIMIT = 135.0  # 99.99 % of chi-square with 80 degrees of freedom; here there are fewer


def words_of(allowed: Tensor) -> Tensor:
    """Return masks [.., words] of what is allowed [.., V], by numpy's own idea of bits."""
    padding = -allowed.shape[-1] % WORD
    bits = np.pad(allowed.numpy(), [(0, 0)] * (allowed.ndim - 1) + [(0, padding)])
    packed = np.packbits(bits, axis=-1, bitorder="little")
    return torch.from_numpy(packed.view(np.int32))


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 64, 100])
def test_every_bit_counts(vocabulary: int) -> None:
    """The sign bit of a word too, and those of the last word, which may be partial."""
    B, T = 3, 2
    allowed = torch.rand(B, T, vocabulary, generator=torch.Generator().manual_seed(1)) < 0.3
    allowed[0, 0] = False
    allowed[0, 0, vocabulary - 1] = allowed[0, 0, 31 % vocabulary] = True
    logits = torch.randn(B, T, vocabulary)
    words = words_of(allowed)
    assert words.shape == (B, T, -(-vocabulary // 32))
    got = without_forbidden(logits, torch.tensor([True, False, True]), words)
    wanted = logits.masked_fill(~allowed, -torch.inf)
    wanted[1] = logits[1]
    assert torch.equal(got, wanted)
    nobody = torch.zeros(B, dtype=torch.bool)
    assert torch.equal(without_forbidden(logits, nobody, words), logits)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_forbidden_is_emitted(seed: int) -> None:
    """This holds in all modes but synthetic; log-probabilities stay the model's own."""
    case = random_mixed(seed, 70, 2)
    case.asked["synthetic"][:] = -1
    case.asked["banned_until"][:] = 0
    slots = len(case.window)
    allowed = torch.rand(slots, 3, 70) < 0.2
    allowed[..., 5] = True
    everyone = torch.ones(slots, dtype=torch.bool)
    grammar = {"constrained": everyone, "allowed": words_of(allowed)}
    judge: Any = partial(accept_mixed, *vars(case).values())
    verdict = judge(grammar=grammar)
    plain = case.logits.log_softmax(-1)
    for b in range(slots):
        for row in range(int(verdict.n[b])):
            token = int(verdict.tokens[b, row])
            assert allowed[b, row, token]
            assert verdict.logprobs[b, row] == plain[b, row, token]
    free = grammar | {"constrained": ~everyone}
    for got, wanted in zip(vars(judge(grammar=free)).values(), vars(judge()).values(), strict=True):
        assert torch.equal(got, wanted)


class ToyMatcher:
    """llguidance's matcher for the language of AFTER."""

    def __init__(self, last: int) -> None:
        self.history = [last]

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        word = sum(1 << token for token in AFTER[self.history[-1]])
        ctypes.memmove(address, word.to_bytes(size, "little"), size)

    def compute_ff_tokens(self) -> list[int]:
        chain, last = [], self.history[-1]
        while len(AFTER[last]) == 1:
            (last,) = AFTER[last]
            chain.append(last)
        return chain

    def consume_token(self, token: int) -> bool:
        assert token in AFTER[self.history[-1]]
        self.history.append(token)
        return True

    def rollback(self, count: int) -> bool:
        del self.history[-count:]
        return True

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False


Bug = Callable[[Constraint], Constraint]


def constraints(bug: Bug) -> dict[tuple[int, ...], Constraint]:
    """Return what the host says of each newest token and its drafts."""
    found = {}
    for count in range(K + 1):
        for newest, *drafts in product(range(V), repeat=count + 1):
            matcher = GrammarMatcher(ToyMatcher(newest), (), K + 1, 1, GREEDY)  # type: ignore[arg-type]
            found[newest, *drafts] = bug(matcher.make_next_constraint(drafts))
    return found


def decode(*, bug: Bug, stale: bool, rejection: bool, block: bool = False) -> Tensor:
    """Return every slot's first COUNT tokens, [SLOTS, COUNT], as a host and a step make them."""
    every = constraints(bug)
    asked = asked_of(
        SLOTS,
        K,
        temperature=torch.ones(SLOTS),
        rejection=torch.full((SLOTS,), rejection),
        block=torch.full((SLOTS,), block),
        uniforms=NUMBERS,
    )
    state = {
        "window": torch.full((SLOTS, K + 1), FIRST),
        "num_drafts": torch.zeros(SLOTS, dtype=torch.int64),
        "lengths": torch.zeros(SLOTS, dtype=torch.int64),
        "thinking": torch.zeros(SLOTS, dtype=torch.bool),
        "draft_probs": torch.full((SLOTS, K, V), 1 / V),
    }
    tokens = torch.full((SLOTS, COUNT + K + 1), -1)
    while True:
        active = state["lengths"] < COUNT
        if not active.any():
            return tokens[:, :COUNT]
        allowed = torch.zeros(SLOTS, K + 1, 1, dtype=torch.int32)
        held, count = state["window"].clone(), state["num_drafts"].clone()
        for known, constraint in every.items():
            same = held[:, : len(known)] == torch.tensor(known)
            rows = same.all(1) & (count == len(known) - 1)
            drafts, kept = torch.tensor(constraint.drafts, dtype=torch.int64), constraint.kept
            allowed[rows] = torch.from_numpy(constraint.allowed)
            state["num_drafts"][rows] = len(drafts)
            state["window"][rows, 1 : 1 + len(drafts)] = drafts
            if not stale and len(drafts) > kept:
                point = torch.nn.functional.one_hot(drafts[kept:], V).float()
                state["draft_probs"][rows, kept : len(drafts)] = point
        everyone = torch.ones(SLOTS, dtype=torch.bool)
        mode = MixedAcceptance(asked, {"constrained": everyone, "allowed": allowed})
        verdict = mode.judge(P[state["window"]].log(), state, active)
        for slot_row in range(K + 1):
            rows = (slot_row < verdict.n).nonzero()[:, 0]
            tokens[rows, state["lengths"][rows] + slot_row] = verdict.tokens[rows, slot_row]
        newest = verdict.tokens.gather(1, (verdict.n - 1).clamp(min=0)[:, None])
        window = [torch.where(active[:, None], newest, state["window"][:, :1])]
        for k in range(1, K + 1):
            window.append(mode.choose(Q[window[-1][:, 0]].log()[:, None], k))
        state |= {
            "window": torch.cat(window, dim=1),
            "num_drafts": torch.full_like(state["num_drafts"], K),
            "lengths": verdict.lengths,
            **mode.draft_probs(state),
        }


def chi_square(tokens: Tensor) -> float:
    """Infinite if a text occurs that the grammar forbids."""
    places = [V**i for i in reversed(range(COUNT))]
    counts = torch.bincount((tokens * torch.tensor(places)).sum(1), minlength=V**COUNT).double()
    allowed = torch.tensor([[float(t in after) for t in range(V)] for after in AFTER])
    law = P * allowed
    law /= law.sum(-1, keepdim=True)
    chances = [
        float(torch.stack([law[a, b] for a, b in pairwise((FIRST, *text))]).prod())
        for text in product(range(V), repeat=COUNT)
    ]
    wanted = SLOTS * torch.tensor(chances).double()
    possible = wanted > 0
    if counts[~possible].any():
        return float("inf")
    return float(((counts - wanted)[possible] ** 2 / wanted[possible]).sum())


MODES = {
    "strict": {"rejection": False},
    "rejection": {"rejection": True},
    "block": {"rejection": True, "block": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_the_law_among_what_is_allowed(mode: str) -> None:
    tokens = decode(bug=lambda constraint: constraint, stale=False, **MODES[mode])
    assert chi_square(tokens) < LIMIT


def first_rows_mask(constraint: Constraint) -> Constraint:
    return replace(constraint, allowed=np.repeat(constraint.allowed[:1], K + 1, axis=0))


def free_behind_the_own(constraint: Constraint) -> Constraint:
    allowed = constraint.allowed.copy()
    allowed[constraint.kept + 1 :] = -1
    return replace(constraint, allowed=allowed)


def forbidden_dropped(constraint: Constraint) -> Constraint:
    """Cut the drafts before the first one that is forbidden: its row then draws from P again."""
    good = [
        bool(constraint.allowed[row, 0] >> draft & 1) for row, draft in enumerate(constraint.drafts)
    ]
    until = good.index(False) if False in good else len(good)
    return replace(constraint, drafts=constraint.drafts[:until], kept=min(constraint.kept, until))


@pytest.mark.parametrize(
    ("bug", "stale", "mode"),
    [
        (first_rows_mask, False, "strict"),
        (free_behind_the_own, False, "strict"),
        (forbidden_dropped, False, "rejection"),
        (lambda constraint: constraint, True, "block"),
    ],
    ids=["mask of the first row", "free rows", "a draft dropped", "stale draft_probs"],
)
def test_planted_bugs_are_found(bug: Bug, stale: bool, mode: str) -> None:
    assert chi_square(decode(bug=bug, stale=stale, **MODES[mode])) > LIMIT
