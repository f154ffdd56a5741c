"""mtpbuild's side of `one_machine.py`; side.py describes its input and output."""

import math
import time
from typing import Any

import numpy as np
from side import Answer, Ask, serve, tokens
from worker import count_read_bytes

import mtpbuild.runtime.programs.onnxruntime  # noqa: F401  (imported before the clock starts)
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.programs import Bools, StepOutput

POOL = 1024  # different rows in a filled cache


class Watched:
    """A wrapper of an engine's programs that records when steps end, and can skip prompts.

    A skipped prompt still has its rows: they are filled with random values after the first step.
    """

    def __init__(self, programs: Any, caches: list[str]) -> None:
        self._programs, self._caches = programs, caches
        self.begin_watch(1, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def begin_watch(self, batch: int, filled: int | None) -> None:
        """Begin to record steps.

        filled: the rows of each skipped prompt; None runs the prompts.
        """
        self.batch, self.filled, self.empty = batch, filled, filled is not None
        self.ends: list[float] = []
        self.emitted: list[int] = []
        self.read: list[int] = []

    def prefill(self, slot: int, start: int, tokens: Any) -> None:
        if self.filled is None:
            self._programs.prefill(slot, start, tokens)

    def step(self, active: Bools, rows: int) -> StepOutput:
        output: StepOutput = self._programs.step(active, rows)
        if int(active.sum()) == self.batch:
            self.ends.append(time.perf_counter())
            self.emitted.append(int(output.num_tokens.sum()))
            self.read.append(count_read_bytes())
            if self.empty:
                self._fill()
        return output

    def _fill(self) -> None:
        draw = np.random.default_rng(0)
        # `state` would show all slots, and so allocate memory for all of them.
        views = self._programs._caches.views(0, self.batch)
        for name in self._caches:
            cache = views[name][:, :, : self.filled]
            pool: Any = draw.standard_normal((POOL, cache.shape[-1]), np.float32)
            if cache.dtype == np.int8:  # no byte makes a scale that is not finite
                pool = draw.integers(0, 60, pool.shape, np.int8)
            for start in range(0, cache.shape[2], POOL):
                part = cache[:, :, start : start + POOL]
                part[...] = pool[: part.shape[2]]
        self.empty = False


class Ours:
    def __init__(self, job: Ask) -> None:
        self.vocabulary = job["vocabulary"]
        self.engine = Engine.load(job["path"], prefix_cache=False, threads=job["threads"])
        state = self.engine.manifest.state
        caches = [s.name for s in state if s.role == "rows" and s.dtype != "bfloat16"]
        # This name is not public; `check.py` uses it too.
        self.loop: Any = self.engine._loaded.loop
        self.watched = self.loop.programs = Watched(self.loop.programs, caches)

    def prompt(self, tokens: list[int]) -> None:
        self.engine.generate(tokens, SamplingParams(max_tokens=1, ignore_eos=True))

    def decode(self, ask: Ask) -> Answer:
        context, batch, rates = ask["context"], ask["batch"], ask.get("rates")
        self.watched.begin_watch(batch, context if ask["filled"] else None)
        # Requests start one by one, with a step between them; the last one to start must still have
        # all its steps beside the others. A skipped prompt takes one turn, whatever its length.
        most = math.ceil((ask["steps"] + batch - 1) * (1 + sum(rates or ())))
        chunk = self.loop._chunk
        if ask["filled"]:
            self.loop._chunk = self.loop._chunk_beside = context
        accepting = {} if rates is None else synthetic(rates)
        if ask.get("drawn"):
            accepting |= {"temperature": 1.0}
        params = [SamplingParams(most, ignore_eos=True, **accepting, seed=i) for i in range(batch)]
        prompts = [tokens(context, self.vocabulary, seed) for seed in range(batch)]
        results = self.engine.generate(prompts, params)
        self.loop._chunk = self.loop._chunk_beside = chunk
        ids = [token for result in results for token in result.token_ids]
        steps, emitted = np.diff(self.watched.ends).tolist(), self.watched.emitted[1:]
        read = np.diff(self.watched.read).tolist()
        self.watched.begin_watch(1, None)
        distinct = len(set(ids)) / len(ids)
        counts = {"tokens": len(ids), "distinct": distinct}
        return {"steps": steps, "emitted": emitted, "read": read, **counts}


def synthetic(rates: list[float]) -> dict[str, Any]:
    """Return parameters that accept drafts at random.

    rates: for the first draft, for the first two, and so on.
    """
    return {
        "acceptance": "rejection",
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }


if __name__ == "__main__":
    serve(Ours)
