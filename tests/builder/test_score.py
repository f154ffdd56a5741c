"""Log-probabilities of prompts in built engines, against transformers' logits (O1)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mtpbuild.runtime import Engine, RequestError, SamplingParams
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.requests.step_controls import make_step_controls
from tests.support.checkpoints import SMALL, random_checkpoint, write_tokenizer
from tests.support.engines import EngineBuilder
from tests.support.fakes import fake_manifest
from tests.support.live_server import live
from tests.support.requests import build, build_request
from tests.support.transformers_oracle import transformers_model

pytestmark = pytest.mark.xdist_group("score")  # another worker would wait for the engine
IDS = np.random.default_rng(7).integers(2, 61, 70).tolist()
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=20)
ATOL = 2e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scored") / "checkpoint"
    random_checkpoint(made, **SMALL)
    write_tokenizer(made / "tokenizer.json", 61)
    return made


@pytest.fixture(
    scope="module", params=["onnxruntime", pytest.param("inductor", marks=pytest.mark.full)]
)
def engine(
    folder: Path, build_engine: EngineBuilder, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    """Build an engine that drafts: score fills the module's cache, too. IDS are several chunks."""
    flags = {"prefill_chunk": 16, "max_batch": 2, "score": True, "target": request.param}
    with Engine.load(build_engine(folder, 1, **flags), threads=1, prefix_cache=True) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def wanted(folder: Path) -> torch.Tensor:
    """Return the model's log-probabilities behind each of IDS."""
    torch.set_num_threads(1)
    with torch.no_grad():
        logits: torch.Tensor = transformers_model(folder)(torch.tensor([IDS])).logits[0]
    return logits.log_softmax(-1)


def test_they_are_the_models_own(engine: Engine, wanted: torch.Tensor) -> None:
    for _ in range(2):  # the second time a prefix of the prompt is known
        result = engine.generate(IDS, SCORED)
        assert (result.token_ids, result.finish_reason, result.text) == ([], "length", "")
        told = result.prompt_logprobs
        assert told is not None
        assert [entry.token_id for entry in told] == IDS[1:]
        for entry, row in zip(told, wanted, strict=False):
            assert abs(entry.logprob - row[entry.token_id]) < ATOL
            others = row - row[entry.token_id]
            assert (others > ATOL).sum() < entry.rank <= 1 + (others > -ATOL).sum()
            assert [value for _, value in entry.top] == pytest.approx(
                row.topk(20).values.tolist(), abs=ATOL
            )
            assert len(entry.top) == 20
            assert (entry.top[0][0] == entry.token_id) == (entry.rank == 1)


def test_the_answer_is_as_without(engine: Engine) -> None:
    """The caches that score has filled are those of prefill; beside it, others go on."""
    plain = SamplingParams(max_tokens=30, ignore_eos=True)
    scored = SamplingParams(max_tokens=30, ignore_eos=True, prompt_logprobs=0, logprobs=20)
    one, other, short = engine.generate([IDS, IDS, [5]], [plain, scored, SCORED])
    assert one.token_ids == other.token_ids
    assert other.logprobs is not None
    assert {len(entry.top) for entry in other.logprobs} == {20}
    assert short.prompt_logprobs == []
    first = engine.generate(IDS, SCORED).prompt_logprobs
    again = engine.generate(IDS, scored).prompt_logprobs
    assert first is not None
    assert again is not None
    assert [entry.logprob for entry in first] == [entry.logprob for entry in again]


def test_rows_that_scores_leave_and_find(engine: Engine) -> None:
    """Others begin behind what a score has filled in; what is scored is always filled in anew."""
    plain = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=3)
    engine.reset_prefix_cache()
    cold = engine.generate(IDS, plain)
    engine.reset_prefix_cache()
    first = engine.generate(IDS, SCORED)
    warm, other = (engine.generate(prompt, plain) for prompt in (IDS, [*IDS[:40], *IDS[:30]]))
    again = engine.generate(IDS, SCORED)
    cached = [each.metrics.cached_tokens for each in (cold, first, warm, other, again)]
    assert cached == [0, 0, len(IDS) - 2, 39, 0]  # it drafts with MTP vanilla
    assert (warm.token_ids, warm.from_draft) == (cold.token_ids, cold.from_draft)
    assert warm.logprobs is not None
    assert cold.logprobs is not None
    given = [each.logprob for each in warm.logprobs]
    assert given == pytest.approx([each.logprob for each in cold.logprobs], abs=ATOL)
    assert again.prompt_logprobs == first.prompt_logprobs
    engine.reset_prefix_cache()
    assert engine.generate([*IDS[:40], *IDS[:30]], plain).token_ids == other.token_ids


def test_over_http(engine: Engine, wanted: torch.Tensor) -> None:
    """As lm-eval asks, and as vLLM answers."""
    best = wanted.max(-1).values
    with live(engine) as server, server.client() as client:
        asked = {"prompt": [IDS, IDS[:9]], "echo": True, "logprobs": 1, "temperature": 0}
        for count in (0, 1):
            body = asked | {"max_tokens": count}
            whole, short = client.post("/v1/completions", json=body).json()["choices"]
            told = whole["logprobs"]
            assert len(short["logprobs"]["tokens"]) == 9 + count
            assert len(told["tokens"]) == len(told["text_offset"]) == len(IDS) + count
            assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
            given = told["token_logprobs"][1 : len(IDS)]
            chosen = wanted[range(len(IDS) - 1), IDS[1:]].tolist()
            assert given == pytest.approx(chosen, abs=ATOL)
            tops = [max(top.values()) for top in told["top_logprobs"][1 : len(IDS)]]
            assert tops == pytest.approx(best[:-1].tolist(), abs=ATOL)
            greedy = [mine == top for mine, top in zip(given, tops, strict=True)]
            assert greedy == [id == row.argmax() for id, row in zip(IDS[1:], wanted, strict=False)]
        body = {"prompt": IDS, "prompt_logprobs": 2, "max_tokens": 1}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        for id, entries in zip(IDS[1:], rest, strict=True):
            assert len(entries) == (2 if entries[str(id)]["rank"] <= 2 else 3)
            assert sorted(entry["rank"] for entry in entries.values())[:2] == [1, 2]
        refused = client.post("/v1/completions", json=asked | {"stream": True})
        assert refused.status_code == 400
        assert "can't go with stream" in refused.json()["error"]["message"]


def test_who_has_none_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="build it anew with `--score` for target onnx"):
        make_step_controls([5], SCORED, fake_manifest())
    with pytest.raises(RequestError, match="max_tokens must be a number from 1"):
        SamplingParams(max_tokens=0)
    with pytest.raises(UsageError, match="--score is for target onnxruntime or inductor on a CPU"):
        build(build_request(folder, (1,), target="tensorrt", score=True, out=tmp_path))
