"""The plain model does each step again, from nothing but the trace of a built engine."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.runtime import Engine, SamplingParams, Trace
from mtpbuild.runtime.contract.controls import StepControls
from mtpbuild.runtime.contract.drafters import VANILLA
from mtpbuild.runtime.trace.lines import RequestLine, TracedRequest, read_trace
from tests.reference.recompute import draft_logits, row_logits
from tests.reference.sampling import distribution
from tests.support.engines import EngineBuilder

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engines
COUNT, NAMES = 40, ("greedy", "sampled", "measured")
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
HOT = replace(GREEDY, temperature=0.8, top_p=0.95, logprobs=0)  # the seed is drawn


@pytest.fixture(scope="module")
def traced(
    predictable_engine: EngineBuilder, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, TracedRequest]:
    """Three requests in a batch of three slots."""
    path = tmp_path_factory.mktemp("trace") / "out.jsonl"
    folder = predictable_engine(3, max_batch=3)
    with Engine.load(folder, threads=1) as engine, Trace(engine, path) as trace:
        streams = [
            engine.stream([20, 21, 22], GREEDY, observer=trace.request("greedy")),
            engine.stream([9, 33], HOT, observer=trace.request("sampled")),
            engine.stream([12, 7], replace(GREEDY, logprobs=0), observer=trace.request("measured")),
        ]
        results = dict(zip(NAMES, (stream.result() for stream in streams), strict=True))
    found = {str(name): request for name, request in read_trace(path).requests.items()}
    for name, result in results.items():
        assert [step.tokens[row] for step, row in found[name].rows()] == result.token_ids
        assert result.metrics.speculative_decoding.num_accepted_draft_tokens
    return found


@pytest.mark.parametrize("name", NAMES)
def test_replay(name: str, traced: dict[str, TracedRequest], predictable: PlainDeepseek) -> None:
    request = traced[name].request
    known, rejected = list(request.prompt), 0
    for step in traced[name].steps:
        assert step.position == len(known) - 1
        m = step.num_drafts
        logits = row_logits(predictable, [*known, *step.window[1:]])[-m - 1 :].double().numpy()
        numbers = step.uniforms.draft if step.uniforms else [None] * (m + 1)
        target = [_target(*row, request) for row in zip(logits, numbers, strict=True)]
        n = 1
        while n <= m and step.window[n] == target[n - 1]:
            n += 1
        assert step.tokens == [*step.window[1:n], target[n - 1]]
        rejected += n <= m
        plain = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = [plain[j, token] for j, token in enumerate(step.tokens)]
        assert step.logprobs == pytest.approx(expected, abs=1e-4)
        top = np.sort(logits[:n])
        margins = step.margins if name == "sampled" else list(top[:, -1] - top[:, -2])
        assert step.margins == pytest.approx(margins, abs=1e-4)
        known += step.tokens
    assert rejected


@pytest.mark.parametrize("name", ["sampled", "measured"])
def test_what_it_says_of_drafts(
    name: str, traced: dict[str, TracedRequest], predictable: PlainDeepseek
) -> None:
    """Of accepted and rejected ones: the models' logits give probability, rank and q again."""
    request, wrong = traced[name].request, 0
    known = list(request.prompt)
    for step in traced[name].steps:
        drafts = step.window[1:]
        assert step.draft_logprobs is not None
        assert step.draft_ranks is not None
        assert len(step.draft_ranks) == step.num_drafts
        rows = row_logits(predictable, [*known, *drafts])[len(known) - 1 :].double().numpy()
        for j, draft in enumerate(drafts):
            plain = rows[j] - np.log(np.exp(rows[j]).sum())
            assert step.draft_logprobs[j] == pytest.approx(plain[draft], abs=1e-4)
            before, up_to = ((plain > plain[draft] + by).sum() for by in (1e-4, -1e-4))
            assert before < step.draft_ranks[j] <= up_to
            wrong += step.draft_ranks[j] > 1
        q = _drawn_with(predictable, request, known, drafts)
        assert step.draft_q == (q if q is None else pytest.approx(q, abs=1e-4))
        known += step.tokens
    assert wrong > 3


def _drawn_with(
    model: PlainDeepseek, request: RequestLine, known: list[int], drafts: list[int]
) -> list[float] | None:
    """Return the probability of each draft by the drafter; None for drafts that are an argmax."""
    if request.greedy:
        return None
    found = draft_logits(model, known, len(drafts), VANILLA, drafts) if drafts else []
    laws = [_law(logits.double().numpy(), request) for logits in found]
    return [float(law[draft]) for law, draft in zip(laws, drafts, strict=True)]


def _law(logits: NDArray[np.float64], request: RequestLine) -> NDArray[np.float64]:
    asked = {name: request.params[name] for name in ("temperature", "top_p")}
    return distribution(logits, StepControls(**asked))


def _target(logits: NDArray[np.float64], number: float | None, request: RequestLine) -> int:
    """Return what plain decoding emits for a row; a sampled one draws with `number`."""
    if request.greedy:
        assert number is None
        return int(logits.argmax())
    return int((np.cumsum(_law(logits, request)) <= np.float32(number)).sum())
