"""Crowds of made-up requests: what an engine says beside others must be what it says alone."""

from collections.abc import Sequence

import numpy as np

from mtpbuild.runtime import Engine, SamplingParams

Text = list[tuple[int, float]]  # tokens with their log-probabilities


class Case:
    """Random prompts, parameters, and where a request is cancelled; each has its number's seed.

    longest: tokens of an answer. beginning: what the prompt begins with.
    """

    def __init__(self, number: int, longest: int, beginning: Sequence[int] = ()) -> None:
        rng = np.random.default_rng(number)
        self.prompt = [*beginning, *rng.integers(8, 2040, rng.integers(1, 90)).tolist()]
        length = int(rng.integers(1, longest))
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
    """Play requests; beside others, each is cancelled after the tokens that are kept of it."""
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
    return [(token, output.logprob) for token, output in pairs]


def check_crowd(engine: Engine, requests: list[Case], alone: list[Text]) -> None:
    """Each has got what it gets alone, up to where it was cancelled."""
    got = texts(engine, requests, at_once=True)
    for case, own, theirs in zip(requests, got, alone, strict=True):
        assert own == theirs[: len(own)], f"request {case.params.seed}"
        assert len(own) >= min(case.kept, len(theirs))
