"""Penalties and biases: rows by hand, texts for any nextn, and laws (oracles O2, O4, O5).

The language of the laws is that of `tests/support/chain.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtpbuild.plugins import penalties as module
from mtpbuild.plugins.accept_mixed.op import accept_mixed
from mtpbuild.plugins.penalties import apply_penalties, record_window
from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from tests.reference.sampling import edited
from tests.support.acceptance_cases import BEGIN, CLOSE, END, SURE, A, B, Case, D, operands
from tests.support.chain import COUNT, FIRST, LIMIT, NUMBERS, P, chi_square, decode
from tests.support.kernels import asked_of_penalties

PENALTIES = StepControls(
    presence_penalty=0.7,
    frequency_penalty=-0.4,
    repetition_penalty=1.5,
    prompt_length=1,
    bias_ids=(2, 1),
    bias_values=(0.5, -0.25),
)
SOME = 300  # slots, where texts are compared and not counted
ONE_EACH = [
    StepControls(presence_penalty=1.5, prompt_length=6),
    StepControls(frequency_penalty=0.8, prompt_length=6),
    StepControls(repetition_penalty=1.7, prompt_length=6),
    StepControls(repetition_penalty=0.5, prompt_length=6),
    StepControls(bias_ids=(0, 9), bias_values=(-100.0, 3.0)),
    replace(PENALTIES, prompt_length=6),
    GREEDY,
]


def rows(controls: StepControls, logits: Tensor, tokens: list[int], lengths: int) -> Tensor:
    """One slot's logits [R, V] edited, by a history whose place behind `lengths` is random."""
    R = logits.shape[0]
    history = torch.randint(0, logits.shape[1], (1, 40))
    history[0, :lengths] = torch.tensor(tokens[:lengths])
    ahead = torch.tensor([tokens[lengths:]])
    assert ahead.shape[1] >= R
    asked = asked_of_penalties(1, controls)
    return apply_penalties(
        logits[None], history, torch.tensor([lengths]), ahead.split(1, dim=1), asked
    )[0]


@pytest.mark.parametrize("controls", ONE_EACH)
@pytest.mark.parametrize("lengths", [5, 8, 20])  # 5: the newest token is the prompt's last
def test_a_row_sees_the_tokens_before_it(controls: StepControls, lengths: int) -> None:
    """Row j is edited as vLLM would if the window's first j drafts had been emitted."""
    torch.manual_seed(lengths)
    logits, T = torch.randn(4, 11) * 3, 4
    logits[1, 3] = -torch.inf  # banned, and so it stays
    tokens = torch.randint(0, 11, (lengths + T,)).tolist()
    got = rows(controls, logits, tokens, lengths)
    for j in range(T):
        known = tokens[: lengths + 1 + j]
        wanted = edited(logits[j].double().numpy(), known, 6, controls)
        np.testing.assert_allclose(got[j], wanted, rtol=1e-6, atol=1e-6)
    # A draft's single row has seen all that stands before it.
    np.testing.assert_array_equal(rows(controls, logits[3:], tokens, lengths)[0], got[3])


def test_who_asks_for_nothing_is_left_alone() -> None:
    """Beside a request that is penalised, to the bit; and without one."""
    logits = torch.randn(2, 3, 11)
    history, lengths = torch.zeros(2, 9).long(), torch.tensor([4, 4])
    ahead = (torch.ones(2, 3).long(),)
    mixed, plain = asked_of_penalties(2, PENALTIES), asked_of_penalties(1, GREEDY)
    for name, tensor in mixed.items():
        tensor[1] = plain[name][0]
    got = apply_penalties(logits, history, lengths, ahead, mixed)
    assert torch.equal(got[1], logits[1])
    assert not torch.equal(got[0], logits[0])


def test_a_draft_outside_the_vocabulary_counts_nowhere() -> None:
    logits = torch.randn(2, 5)
    got = rows(replace(PENALTIES, prompt_length=0), logits, [1, 2, 7, -1], 2)
    wanted = edited(logits[1].double().numpy(), [1, 2], 0, PENALTIES)
    np.testing.assert_allclose(got[1], wanted, rtol=1e-6)


def test_rejected_drafts_are_written_over() -> None:
    history = record_window(torch.zeros(1, 8).long(), torch.tensor([[5, 6, 7]]), torch.tensor([2]))
    assert history.tolist() == [[0, 0, 5, 6, 7, 0, 0, 0]]
    again = record_window(history, torch.tensor([[6, 9, 9]]), torch.tensor([3]))
    assert again.tolist() == [[0, 0, 5, 6, 9, 9, 0, 0]]


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
@pytest.mark.parametrize("block", [False, True], ids=["alone", "block"])
def test_joint_law(sampled: bool, block: bool) -> None:
    """Rejection and block verification draw from the penalised chain, whose law looks back."""
    tokens = decode(rejection=True, block=block, sampled=sampled, penalties=PENALTIES)
    assert chi_square(tokens, PENALTIES) < LIMIT
    assert chi_square(tokens) > 10 * LIMIT, "the penalties matter"


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
def test_strict_text_does_not_depend_on_drafts(sampled: bool) -> None:
    """O2: the tokens of nextn 0, which are those of sampling by the formulas one by one."""
    for nextn in (0, 2, 4):
        assert strict(nextn, sampled) == [one_by_one(slot) for slot in range(SOME)]


def strict(nextn: int, sampled: bool) -> list[list[int]]:
    settings: dict[str, Any] = {"rejection": False, "sampled": sampled, "nextn": nextn}
    found: list[list[int]] = decode(**settings, penalties=PENALTIES, slots=SOME).tolist()
    return found


def one_by_one(slot: int) -> list[int]:
    tokens = [FIRST]
    for position in range(1, COUNT + 1):
        logits = edited(P[tokens[-1]].log().double().numpy(), tokens, 1, PENALTIES)
        cdf = np.cumsum(np.exp(logits))
        tokens.append(int((cdf <= float(NUMBERS[slot, 0, position]) * cdf[-1]).sum()))
    return tokens[1:]


def after(prompt: int) -> StepControls:
    """Presence counts the tokens behind a prompt of that length."""
    return StepControls(presence_penalty=1.0, prompt_length=prompt)


def counted(frequency: float) -> StepControls:
    return StepControls(frequency_penalty=frequency, prompt_length=7)


HAND = [
    # The window's newest token is A, at position 7.
    ("nothing", GREEDY, Case([A], [CLOSE, CLOSE], [A, A])),
    ("a draft is in the output for the next row", after(8), Case([A], [CLOSE, CLOSE], [A, B])),
    ("the newest token is", after(7), Case([A], [CLOSE, CLOSE], [B])),
    ("the newest token counts once", counted(0.1), Case([A], [CLOSE, SURE], [A, A])),
    ("a larger frequency", counted(0.2), Case([A], [CLOSE, SURE], [B])),
    ("a repetition", StepControls(repetition_penalty=1.2), Case([A], [CLOSE, CLOSE], [A, A])),
    (
        "a kept draft is too far in the next row",
        after(8),
        Case([B, B], [CLOSE, CLOSE, CLOSE], [B, A], 3, 0.1),
    ),
    ("relaxed otherwise", GREEDY, Case([B, B], [CLOSE, CLOSE, CLOSE], [B, B, A], 3, 0.1)),
    ("a bias", StepControls(bias_ids=(D,), bias_values=(9.0,)), Case([D], [CLOSE, SURE], [D, D])),
    (
        "banned it stays",
        StepControls(bias_ids=(D,), bias_values=(100.0,)),
        Case([D], [CLOSE, SURE], [A], banned=[D], banned_until=1),
    ),
]


@pytest.mark.parametrize(
    ("controls", "case"), [pytest.param(*given, id=name) for name, *given in HAND]
)
def test_by_hand(controls: StepControls, case: Case) -> None:
    *_, raw = given = operands(case)
    asked = dict(raw) | asked_of_penalties(1, controls)
    history = torch.tensor([[BEGIN, B, END, END, BEGIN, BEGIN, B, *[D] * 9]])
    verdict = accept_mixed(*given[:-1], asked, history)
    assert verdict.tokens[0, : int(verdict.n)].tolist() == case.emitted
    # Log-probabilities stay raw.
    assert verdict.top_logprobs is not None
    probabilities = torch.tensor(case.rows)
    shares = probabilities / probabilities.sum(-1, keepdim=True)
    wanted = shares.log().topk(probabilities.shape[-1]).values
    torch.testing.assert_close(verdict.top_logprobs[0], wanted)


Seen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
seen: Seen = module._seen


def newest_counted_twice(
    logits: Tensor, history: Tensor, lengths: Tensor, ahead: Tensor, prompt_length: Tensor
) -> tuple[Tensor, Tensor]:
    contained, counts = seen(logits, history, lengths, ahead, prompt_length)
    again = torch.nn.functional.one_hot(ahead[:, 0].clamp(min=0), logits.shape[-1])[:, None]
    return contained, counts + again * (lengths >= prompt_length)[:, None, None]


def prompt_counted_as_output(
    logits: Tensor, history: Tensor, lengths: Tensor, ahead: Tensor, prompt_length: Tensor
) -> tuple[Tensor, Tensor]:
    return seen(logits, history, lengths, ahead, torch.zeros_like(prompt_length))


def drafts_not_counted(
    logits: Tensor, history: Tensor, lengths: Tensor, ahead: Tensor, prompt_length: Tensor
) -> tuple[Tensor, Tensor]:
    """Every row sees what the first one sees."""
    rows = logits.shape[1]
    contained, counts = seen(logits, history, lengths, ahead, prompt_length)
    return contained[:, :1].expand(-1, rows, -1), counts[:, :1].expand(-1, rows, -1)


def not_reset(
    logits: Tensor, history: Tensor, lengths: Tensor, ahead: Tensor, prompt_length: Tensor
) -> tuple[Tensor, Tensor]:
    """Count what rejected drafts and earlier requests have left, too."""
    everywhere = torch.full_like(lengths, history.shape[1])
    contained, counts = seen(logits, history, everywhere, ahead, prompt_length)
    return contained, counts


@pytest.mark.parametrize(
    "bug", [newest_counted_twice, prompt_counted_as_output, drafts_not_counted, not_reset]
)
def test_the_oracle_catches(bug: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_seen", bug)
    assert strict(2, sampled=True) != [one_by_one(slot) for slot in range(SOME)]
