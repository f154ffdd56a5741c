"""The plain model does each step again, from nothing but the trace of a built engine."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.runtime import Engine, SamplingParams, Trace
from mtpbuild.runtime.contract.controls import StepControls
from mtpbuild.runtime.trace.lines import RequestLine, TracedRequest, read_trace
from tests.reference.recompute import row_logits
from tests.reference.sampling import distribution
from tests.support.engines import EngineBuilder

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engines
COUNT = 40
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
HOT = replace(GREEDY, temperature=0.8, top_p=0.95)  # the seed is drawn


@pytest.fixture(scope="module")
def traced(
    predictable_engine: EngineBuilder, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, TracedRequest]:
    """Two requests in a batch of three slots."""
    path = tmp_path_factory.mktemp("trace") / "out.jsonl"
    folder = predictable_engine(3, max_batch=3)
    with Engine.load(folder, threads=1) as engine, Trace(engine, path) as trace:
        streams = [
            engine.stream([20, 21, 22], GREEDY, observer=trace.request("greedy")),
            engine.stream([9, 33], HOT, observer=trace.request("sampled")),
        ]
        results = {"greedy": streams[0].result(), "sampled": streams[1].result()}
    found = {str(name): request for name, request in read_trace(path).requests.items()}
    for name, result in results.items():
        assert [step.tokens[row] for step, row in found[name].rows()] == result.token_ids
        assert result.metrics.speculative_decoding.num_accepted_draft_tokens
    return found


@pytest.mark.parametrize("name", ["greedy", "sampled"])
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
        margins = list(top[:, -1] - top[:, -2]) if name == "greedy" else step.margins
        assert step.margins == pytest.approx(margins, abs=1e-4)
        known += step.tokens
    assert rejected


def _target(logits: NDArray[np.float64], number: float | None, request: RequestLine) -> int:
    """Return what plain decoding emits for a row; a sampled one draws with `number`."""
    if request.greedy:
        assert number is None
        return int(logits.argmax())
    params = request.params
    p = distribution(logits, StepControls(temperature=params["temperature"], top_p=params["top_p"]))
    return int((np.cumsum(p) <= np.float32(number)).sum())
