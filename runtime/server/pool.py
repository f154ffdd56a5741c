"""Thread pools for long work, so that the event loop is not blocked."""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from mtpbuild.runtime.server.errors import ApiError

P = ParamSpec("P")
R = TypeVar("R")


class Pool:
    """A few threads for jobs of one kind, with a limit on the jobs that run or wait.

    If its caller is cancelled, a job that has not started is dropped. Jobs with the same key count
    once towards the limit, since the first one does the work (and caches it) for the others.
    """

    def __init__(self, name: str, threads: int, limit: int, busy: str) -> None:
        """busy: the error message for a client whose job exceeds the limit."""
        self._executor = ThreadPoolExecutor(threads, name)
        self._limit, self._busy = limit, busy
        self._jobs: dict[Future[Any], Hashable] = {}

    async def run(self, key: Hashable, call: Callable[P, R], *args: P.args, **kw: P.kwargs) -> R:
        """Return what the call returns; raises ApiError if the limit is reached."""
        keys = set(self._jobs.values())
        if key not in keys and len(keys) >= self._limit:
            raise ApiError(429, self._busy)
        job = self._executor.submit(call, *args, **kw)
        self._jobs[job] = key
        job.add_done_callback(lambda done: self._jobs.pop(done, None))
        return await asyncio.wrap_future(job)
