"""Oracle O5: strict acceptance and rewind, case by case."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from mtpbuild.plugins import accept_best, accept_rewind, best_of_blocks
from mtpbuild.plugins.accept_rewind.op import best_token

A, B, C, D, E, F, G, H, X, Y = range(10)
V, NONE = 10, -1


class Case(NamedTuple):
    window: Sequence[int]  # newest token, then drafts
    model: Sequence[int]  # the target token of each row
    emitted: Sequence[int]
    num_drafts: int | None = None  # None: all are real
    active: bool = True


CASES = {
    # TensorRT-LLM's blog: A B C are accepted, H is emitted after them.
    "the blog's example": Case([G, A, B, C, D, E], [A, B, C, H, X, Y], [A, B, C, H]),
    "all accepted, and a bonus": Case([G, A, B, C], [A, B, C, D], [A, B, C, D]),
    "none accepted": Case([G, A, B, C], [D, B, C, D], [D]),
    "only the first": Case([G, A, B, C], [A, D, C, D], [A, D]),
    "only the last wrong": Case([G, A, B, C], [A, B, D, E], [A, B, D]),
    "a match after a mismatch counts nothing": Case([G, A, B, C], [A, X, C, D], [A, X]),
    "the newest token is not judged": Case([A, A, B], [A, B, C], [A, B, C]),
    "equal tokens": Case([A, A, A, A], [A, A, A, A], [A, A, A, A]),
    "fewer real drafts": Case([G, A, B, C], [A, B, C, D], [A, B], num_drafts=1),
    "fewer real drafts, one wrong": Case([G, A, B, C], [A, X, C, D], [A, X], num_drafts=2),
    "no real draft": Case([G, A, B, C], [A, B, C, D], [A], num_drafts=0),
    "token 0 is an ordinary draft": Case([G, A, A], [A, A, B], [A, A, B]),
    "padding drafts": Case([G, NONE, NONE], [A, B, C], [A]),
    "padding after a draft": Case([G, A, NONE], [A, B, C], [A, B]),
    "padding that num_drafts counts out": Case([G, A, NONE], [A, B, C], [A, B], num_drafts=1),
    "drafts outside the vocabulary": Case([G, V, 10**9], [A, B, C], [A]),
    "nextn 0": Case([G], [A], [A]),
    "inactive": Case([G, A, B, C], [A, B, C, D], [], active=False),
    "inactive without drafts": Case([G], [A], [], active=False),
}


def logits_of(targets: Sequence[int], seed: int = 0) -> torch.Tensor:
    """[1, T, V]: random, with each row's maximum at its target."""
    logits = torch.randn(len(targets), V, generator=torch.Generator().manual_seed(seed))
    logits[range(len(targets)), list(targets)] = logits.max() + 1
    return logits[None]


def run(case: Case, length: int = 20) -> tuple[list[int], int, int]:
    window = torch.tensor([case.window])
    drafts = len(case.window) - 1 if case.num_drafts is None else case.num_drafts
    tokens, n, lengths, logprobs, margins = accept_rewind(
        logits_of(case.model),
        window,
        torch.tensor([drafts]),
        torch.tensor([length]),
        torch.tensor([case.active]),
    )
    assert tokens.shape == logprobs.shape == margins.shape == window.shape
    assert {tokens.dtype, n.dtype, lengths.dtype} == {torch.int64}
    return tokens[0].tolist(), int(n), int(lengths)


@pytest.mark.parametrize("name", CASES)
def test_strict_acceptance(name: str) -> None:
    case = CASES[name]
    tokens, n, length = run(case)
    assert n == len(case.emitted)
    assert tokens == [*case.emitted, *[NONE] * (len(case.window) - n)]
    assert length == 20 + n


def test_slots_are_judged_alone() -> None:
    """All cases of one width as one batch give what each gives alone."""
    cases = [case for case in CASES.values() if len(case.window) == 4]
    assert len(cases) > 5
    lengths = torch.arange(len(cases)) * 3
    tokens, n, after, *_ = accept_rewind(
        torch.cat([logits_of(case.model, i) for i, case in enumerate(cases)]),
        torch.tensor([case.window for case in cases]),
        torch.tensor([3 if case.num_drafts is None else case.num_drafts for case in cases]),
        lengths,
        torch.tensor([case.active for case in cases]),
    )
    for i, case in enumerate(cases):
        assert (tokens[i].tolist(), int(n[i]), int(after[i])) == run(case, 3 * i)


@pytest.mark.parametrize("tied", [(A, C), (C, Y), (A, B, C, D)])
def test_ties_go_to_the_lowest_id(tied: tuple[int, ...]) -> None:
    logits = torch.full((1, 3, V), -1.0)
    logits[0, :, list(tied)] = 2.0
    args = torch.tensor([2]), torch.tensor([5]), torch.tensor([True])
    tokens, n, _, _, margins = accept_rewind(logits, torch.tensor([[G, tied[0], tied[1]]]), *args)
    assert tokens.tolist() == [[tied[0], tied[0], NONE]]  # the second draft is the higher id
    assert n.tolist() == [2]
    assert margins.eq(0).all()


def test_logprobs_and_margins_are_those_of_the_target_tokens() -> None:
    """Every row has them, those beyond n too: a trace shows what was rejected."""
    torch.manual_seed(1)
    logits = torch.randn(2, 3, V) * 3
    none = torch.tensor([0, 0])
    *_, logprobs, margins = accept_rewind(
        logits, torch.zeros(2, 3, dtype=torch.int64), none, none, torch.tensor([True, False])
    )
    best = logits.log_softmax(-1).sort(-1, descending=True).values
    torch.testing.assert_close(logprobs, best[..., 0])
    torch.testing.assert_close(margins, best[..., 0] - best[..., 1])


@pytest.mark.parametrize("vocab", [40, 4500, 9001])
def test_ranks_judge_by_their_best_logits(vocab: int) -> None:
    """Logits of few levels, so that ranks and blocks tie; one row has none above -inf in a part."""
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randint(0, 3, (4, 3, 2 * vocab), generator=g).float()
    logits[1] += torch.randn(3, 2 * vocab, generator=g)
    logits[2, 0, vocab:] = -torch.inf
    logits[3, 1, 5] = torch.nan
    window = logits.nan_to_num().argmax(-1).roll(1, dims=1)
    slots = window, torch.tensor([2, 2, 1, 2]), torch.arange(4), torch.tensor([True] * 4)
    low, high = (best_of_blocks(part) for part in logits.split(vocab, -1))
    high[..., 4] += vocab
    best = torch.cat([low, high], 2)
    torch.testing.assert_close(
        accept_best(best, *slots), accept_rewind(logits, *slots), equal_nan=True
    )
    assert torch.equal(best_token(best), logits.argmax(-1))


def test_inputs_are_left_alone() -> None:
    inputs = (
        logits_of([A, B]),
        torch.tensor([[G, A]]),
        torch.tensor([1]),
        torch.tensor([4]),
        torch.tensor([True]),
    )
    before = [tensor.clone() for tensor in inputs]
    accept_rewind(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
