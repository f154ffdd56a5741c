"""Runs an engine through mtpbuild's Python interface: python ours.py ENGINE THREADS."""

import sys
from collections.abc import Iterator

from worker import Generate, serve


def load() -> Generate:
    from mtpbuild.runtime import Engine, SamplingParams

    engine = Engine.load(sys.argv[1], threads=int(sys.argv[2]), prefix_cache=False)

    def generate(prompt: list[int], count: int) -> Iterator[list[int]]:
        for chunk in engine.stream(prompt, SamplingParams(count, ignore_eos=True)):
            yield list(chunk.token_ids)

    return generate


serve(load)
