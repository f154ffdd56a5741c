"""Runs llama.cpp with one sequence: python llama_cpp_peer.py MODEL.gguf THREADS CONTEXT."""

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from llama_cpp_model import Context, Model
from worker import Extras, Generate, serve

DEEP, ROUNDS = 200, 100  # cached tokens and repetitions when batches are compared

loaded: list[Context] = []


def load() -> Generate:
    model = Model(sys.argv[1])
    context = Context(model, int(sys.argv[2]), int(sys.argv[3]))
    loaded.append(context)

    def generate(prompt: list[int], count: int) -> Iterator[list[int]]:
        newest, length = context.prompt(prompt), len(prompt)
        yield [newest]
        for _ in range(count - 1):
            context.decode([newest], length)
            length += 1
            newest = context.best(-1)
            yield [newest]

    return generate


def verify(context: Context) -> dict[str, Any]:
    """Measure the milliseconds of a step of 1 token and of 4, in turn, after the same prompt."""
    times: dict[int, list[float]] = {1: [], 4: []}
    context.prompt([20 + i % 100 for i in range(DEEP)])
    for _ in range(ROUNDS):
        for size, found in times.items():
            context.keep(DEEP)
            start = time.perf_counter()
            context.decode(range(30, 30 + size), DEEP, every=True)
            for place in range(size):
                context.best(place)
            found.append(1e3 * (time.perf_counter() - start))
    one, four = (statistics.median(found) for found in times.values())
    return {"step_ms": one, "verify_ms": four, "v": four / one}


def extras() -> Extras:
    return {"verify": lambda: verify(loaded[0])}


serve(load, extras)
