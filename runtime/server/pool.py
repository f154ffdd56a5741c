"""Runs what takes long in threads of its own, while the event loop goes on."""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from mtpbuild.runtime.server.errors import ApiError

P = ParamSpec("P")
R = TypeVar("R")


class Pool:
    """A few threads for jobs of one kind, and a limit of how many of these run or wait.

    A job whose caller has gone is dropped, unless a thread has begun it. Jobs with the same key
    count once: the first one does the work of the others.
    """

    def __init__(self, name: str, threads: int, limit: int, busy: str) -> None:
        """busy: what a client is told whose job is one too many."""
        self._executor = ThreadPoolExecutor(threads, name)
        self._limit, self._busy = limit, busy
        self._jobs: dict[Future[Any], Hashable] = {}

    async def run(self, key: Hashable, call: Callable[P, R], *args: P.args, **kw: P.kwargs) -> R:
        """Return what the call returns; raises ApiError if too many jobs are there already."""
        keys = set(self._jobs.values())
        if key not in keys and len(keys) >= self._limit:
            raise ApiError(429, self._busy)
        job = self._executor.submit(call, *args, **kw)
        self._jobs[job] = key
        job.add_done_callback(lambda done: self._jobs.pop(done, None))
        return await asyncio.wrap_future(job)
