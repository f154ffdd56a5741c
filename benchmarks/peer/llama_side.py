"""llama.cpp's side of `one_machine.py`; side.py describes its input and output.

A step decodes `window` tokens of each sequence and takes the argmax after each of them. Tokens are
random, because the choice of tokens does not affect the time.
"""

import time
from itertools import pairwise

import llama_cpp  # noqa: F401  (imported before the clock starts)
from llama_cpp_model import Context, Model
from side import Answer, Ask, serve, tokens
from worker import count_read_bytes

SEED_ROWS = 16  # tokens of the prompt whose rows fill a cache


class Llama:
    def __init__(self, job: Ask) -> None:
        self.threads, self.vocabulary = job["threads"], job["vocabulary"]
        self.model = Model(job["path"], repack=job["repack"])
        self.caches, self.rows = job["caches"], job["rows"]
        self.context = Context(self.model, self.threads, self.rows, caches=self.caches)

    def prompt(self, tokens: list[int]) -> None:
        if self.context.rows <= len(tokens):  # those of an earlier ask
            self.context.close()
            self.context = Context(self.model, self.threads, self.rows, caches=self.caches)
        self.context.prompt(tokens)

    def decode(self, ask: Ask) -> Answer:
        start, batch, window = ask["context"], ask["batch"], ask.get("window", 1)
        steps = ask["steps"]
        self.context.close()
        rows = start + (1 if window > 1 else steps) + window
        # A step that verifies drops all its tokens, the first one too.
        drafts = window if window > 1 else 0
        self.context = Context(self.model, self.threads, rows, batch, drafts, self.caches)
        if ask["filled"]:
            self.context.prompt(tokens(SEED_ROWS, self.vocabulary))
            for sequence in reversed(range(batch)):
                self.context.fill(sequence, start)
        else:
            self.context.prompt(tokens(start, self.vocabulary))
        seconds, read = [], [count_read_bytes()]
        for i in range(steps):
            at = start if window > 1 else start + i
            new = tokens(batch * window, self.vocabulary, start * steps + i)  # others in other asks
            seconds.append(self.step(new, at, window))
            read.append(count_read_bytes())
        read = [later - before for before, later in pairwise(read)]
        return {"steps": seconds, "read": read, "tokens": steps * batch * window}

    def step(self, new: list[int], at: int, window: int) -> float:
        """Return a step's seconds; with several tokens, they are verified and then dropped."""
        begin = time.perf_counter()
        self.context.run(
            [(token, at + i % window, i // window, True) for i, token in enumerate(new)]
        )
        for place in range(len(new)):
            self.context.best(place)
        seconds = time.perf_counter() - begin
        for sequence in range(len(new) // window if window > 1 else 0):
            self.context.keep(at, sequence)
        return seconds


if __name__ == "__main__":
    serve(Llama)
