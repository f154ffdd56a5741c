"""A million tokens of deepseek-tiny: nothing that happens beside a text changes a bit of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtpbuild.builder.build import build
from mtpbuild.builder.request import BuildRequest
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.cpu_library import find_library

TOKENS = 1_000_000  # of all formats and engines together
ENGINES, FORMATS = 3, ("float32", "int8", "int4")
TOGETHER, LONGEST = 24, 150  # requests that are queued at once, and their tokens at most
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_library() is None, reason="there was no C++ compiler to build it"),
]
Text = list[tuple[int, float]]  # tokens with their log-probabilities


class Case:
    """Draws prompts, parameters, and where a request is cancelled; each has its number's seed."""

    def __init__(self, number: int) -> None:
        rng = np.random.default_rng(number)
        self.prompt = rng.integers(8, 2040, rng.integers(1, 90)).tolist()
        length = int(rng.integers(1, LONGEST))
        self.params = SamplingParams(
            max_tokens=length,
            ignore_eos=True,
            temperature=float(rng.choice([0.0, 0.7, 1.1])),
            top_p=float(rng.choice([1.0, 0.9])),
            seed=number,
            logprobs=1,
        )
        self.kept = int(rng.integers(0, length)) if rng.random() < 0.2 else length


def texts(engine: Engine, requests: list[Case], at_once: bool) -> list[Text]:
    """Play requests; beside others, each is cancelled behind the tokens that are kept of it."""
    found = []
    streams = []
    for each in requests:
        stream = engine.stream(each.prompt, each.params)
        streams.append(stream)
        if not at_once:
            found.append(text(stream.result().token_ids, stream.result().logprobs))
    if not at_once:
        return found
    for each, stream in zip(requests, streams, strict=True):
        own: Text = []
        with stream:
            for chunk in stream:
                own += text(chunk.token_ids, chunk.logprobs)
                if len(own) >= each.kept:
                    break
        found.append(own)
    return found


def text(ids: object, logprobs: object) -> Text:
    pairs = zip(ids, logprobs or (), strict=True)  # type: ignore[call-overload]
    return [(token, said.logprob) for token, said in pairs]


@pytest.mark.parametrize("weights", FORMATS)
def test_a_million_tokens(weights: str, tmp_path: Path) -> None:
    """nextn, drafter, batch, chunk, threads, prefixes and cancellations; greedy and sampled."""
    scheme = None if weights == "float32" else build_scheme(weights)
    whole = BuildRequest("deepseek-tiny", max_seq_len=256, scheme=scheme)
    alone = replace(whole, nextn=(0,), out=tmp_path / "alone")
    vanilla = replace(whole, nextn=(3,), prefill_chunk=5, max_batch=4, out=tmp_path / "vanilla")
    eagle = replace(whole, nextn=(2,), prefill_chunk=33, max_batch=8, out=tmp_path / "eagle")
    folders = [build(r)[0].folder for r in (alone, vanilla, replace(eagle, drafter="mtp-eagle"))]
    quota, compared, number = TOKENS // (len(FORMATS) * ENGINES), 0, 0
    with (
        Engine.load(folders[0], threads=1) as one,
        Engine.load(folders[1], threads=2, prefix_cache=True) as many,
        Engine.load(folders[2], threads=1) as others,
    ):
        while compared < quota:
            requests = [Case(number + i) for i in range(TOGETHER)]
            number += TOGETHER
            wanted = texts(one, requests, at_once=False)
            for engine in (many, others):
                got = texts(engine, requests, at_once=True)
                for i, (own, theirs) in enumerate(zip(got, wanted, strict=True)):
                    assert own == theirs[: len(own)], f"request {requests[i].params.seed}"
                    assert len(own) >= min(requests[i].kept, len(theirs))
            compared += sum(map(len, wanted))
