"""Oracle O5: relaxed acceptance, the thinking phase and rejection, case by case.

The rows' probabilities are written out; tokens are letters. The corners
are those of docs/acceptance.md.
"""

import math

import pytest
import torch

from mtpbuild.plugins import draw, shaped_probs
from mtpbuild.plugins.accept_mixed.op import Verdict, accept_mixed
from mtpbuild.plugins.control_tensors import Controls
from mtpbuild.runtime.contract.controls import MAX_LOGPROBS
from mtpbuild.runtime.sampling.params import COLDEST
from tests.support.acceptance_cases import (
    BANNED,
    BEGIN,
    BLOCK,
    CLOSE,
    END,
    REJECTION,
    RELAXED,
    SAMPLED,
    SURE,
    SYNTHETIC,
    TIE,
    A,
    B,
    C,
    Case,
    D,
    operands,
)


def judge(case: Case) -> Verdict:
    return accept_mixed(*operands(case))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=name)
        for cases in (RELAXED, REJECTION, SAMPLED, BLOCK, SYNTHETIC, BANNED)
        for name, c in cases.items()
    ],
)
def test_case(case: Case) -> None:
    verdict = judge(case)
    n = len(case.emitted)
    assert verdict.tokens[0, :n].tolist() == case.emitted
    assert (verdict.tokens[0, n:] == -1).all()
    assert (int(verdict.n), int(verdict.lengths)) == (n, 7 + n)
    assert bool(verdict.thinking) == (case.thinking if case.after is None else case.after)
    rows = torch.tensor(case.rows)
    wanted = [math.log(rows[j, token] / rows[j].sum()) for j, token in enumerate(case.emitted)]
    assert verdict.logprobs[0, :n].tolist() == pytest.approx(wanted, abs=1e-5)
    assert verdict.top_ids is not None
    assert verdict.top_logprobs is not None
    logprobs = (rows / rows.sum(-1, keepdim=True)).log()
    top = logprobs.topk(min(MAX_LOGPROBS, rows.shape[1])).values
    assert torch.allclose(verdict.top_logprobs[0], top, atol=1e-5)
    assert torch.equal(logprobs.gather(1, verdict.top_ids[0]), top)


def shaped(rows: list[list[float]], *settings: float) -> torch.Tensor:
    """`shaped_probs` of one slot's rows, with its temperature, top_k, top_p and min_p."""
    return shaped_probs(torch.tensor([rows]).log(), *(torch.tensor([x]) for x in settings))[0]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ((1.0, 0, 1.0, 0.0), [A, B, C, D, BEGIN, END]),
        ((1.0, 2, 1.0, 0.0), [A, B]),
        ((1.0, 99, 1.0, 0.0), [A, B, C, D, BEGIN, END]),
        ((1.0, 0, 0.7, 0.0), [A, B]),  # 0.4 is not enough, 0.75 is
        ((1.0, 0, 0.39, 0.0), [A]),
        ((1.0, 0, 1e-9, 0.0), [A]),  # one token is always left
        ((1.0, 0, 1.0, 0.5), [A, B]),
        ((1.0, 0, 1.0, 1.0), [A]),
        ((1.0, 3, 0.8, 0.0), [A, B]),  # of the top 3's mass: 0.75 / 0.9 is enough
        ((1.0, 3, 1.0, 0.4), [A, B]),
        ((0.0, 1, 0.1, 1.0), [A, B, C, D, BEGIN, END]),  # greedy: the plain softmax
    ],
)
def test_filters(settings: tuple[float, int, float, float], kept: list[int]) -> None:
    (p,) = shaped([CLOSE], *settings)
    assert p.nonzero()[:, 0].tolist() == kept
    wanted = torch.tensor(CLOSE)[kept] / sum(CLOSE[i] for i in kept)
    assert torch.allclose(p[kept], wanted, atol=1e-6)


def test_filters_differ_by_row() -> None:
    """Rows of one slot have thresholds of their own."""
    p = shaped([SURE, CLOSE, TIE], 1.0, 2, 1.0, 0.0)
    assert (p > 0).sum(-1).tolist() == [2, 2, 2]


def test_temperature_sharpens() -> None:
    (p,) = shaped([CLOSE], 0.5, 0, 1.0, 0.0)
    squares = torch.tensor(CLOSE).square()
    assert torch.allclose(p, squares / squares.sum(), atol=1e-6)


def test_the_coldest_temperature_leaves_the_most_probable_token() -> None:
    """Of logits of any size; a forbidden token has none."""
    for size in (1e-6, 1.0, 1e6):
        logits = size * torch.tensor([[[1.0, -9.0, 3.0, 2.0, 3.0 - 1e-6, -torch.inf]]])
        for top_p in (1.0, 0.5):
            shaping = map(torch.tensor, ([COLDEST], [0], [top_p], [0.0]))
            assert shaped_probs(logits, *shaping)[0, 0].tolist() == [0, 0, 1, 0, 0, 0]


def test_the_margin_is_the_distance_to_the_cell_border() -> None:
    _, margin = draw(torch.tensor([CLOSE]), torch.tensor([0.5]))
    assert float(margin) == pytest.approx(0.1, abs=1e-6)


class Judged(torch.nn.Module):
    """A verdict with the request's controls in a list, as a step has them."""

    def forward(self, operands: list[torch.Tensor], asked: Controls) -> torch.Tensor:
        return accept_mixed(*operands, asked).tokens  # type: ignore[call-arg, arg-type]


@pytest.mark.full
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_batch_of_one_may_follow(drafts: int) -> None:
    """Exported for a batch, a verdict is for any batch: nothing checks that it is 2 at least."""
    *first, asked = operands(Case([A] * drafts, [SURE] * (drafts + 1), [A]))
    many = [x.repeat_interleave(5, 0) for x in first]
    controls = {name: x.repeat_interleave(5, 0) for name, x in asked.items()}
    batch = {0: torch.export.Dim("batch", min=1, max=8)}
    shapes = [batch for _ in many], dict.fromkeys(controls, batch)
    exported = torch.export.export(Judged(), (many, controls), dynamic_shapes=shapes)
    checks = [node for node in exported.graph.nodes if "_assert_scalar" in str(node.target)]
    assert not checks
    assert exported.module()(first, asked).shape == (1, drafts + 1)
