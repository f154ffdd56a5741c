"""Runs llama.cpp with one sequence: python llama_cpp_peer.py MODEL.gguf THREADS CONTEXT."""

import sys
from collections.abc import Iterator

from llama_cpp_model import Context, Model
from worker import Generate, serve


def load() -> Generate:
    model = Model(sys.argv[1])
    context = Context(model, int(sys.argv[2]), int(sys.argv[3]))

    def generate(prompt: list[int], count: int) -> Iterator[list[int]]:
        newest, length = context.prompt(prompt), len(prompt)
        yield [newest]
        for _ in range(count - 1):
            context.decode([newest], length)
            length += 1
            newest = context.best(-1)
            yield [newest]

    return generate


serve(load)
