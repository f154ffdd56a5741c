"""Which request is in which slot, and who is next."""

import contextlib
from collections import deque
from collections.abc import Iterator

import numpy as np

from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.programs.base import Bools
from mtpbuild.runtime.request import Request


class Scheduler:
    """B slots and a queue. Any thread may `add` and `cancel`; only the loop does the rest."""

    def __init__(self, slots: int) -> None:
        self.slots: list[Request | None] = [None] * slots
        self.waiting: deque[Request] = deque()
        self.active: Bools = np.zeros(slots, np.bool_)  # [B]
        self._cancelled: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ask for the end of a request; it ends before the next step."""
        if not request.ended:
            request.cancelled = True
            self._cancelled.append(request)

    @property
    def running(self) -> list[tuple[int, Request]]:
        """The requests that have not ended, with their slots."""
        return [(s, r) for s, r in enumerate(self.slots) if r is not None and not r.ended]

    def admit(self) -> Iterator[tuple[int, Request]]:
        """Free the slots of requests that have ended; yield the waiting ones that move in."""
        self._end_cancelled()
        for slot, request in enumerate(self.slots):
            if request is None or request.ended:
                self.slots[slot] = self.waiting.popleft() if self.waiting else None
                if newcomer := self.slots[slot]:
                    yield slot, newcomer
            self.active[slot] = self.slots[slot] is not None

    def close_ranks(self) -> Iterator[tuple[int, int]]:
        """Yield moves (source, target) that leave no free slot below a request.

        A step computes every slot up to the last one, so a move pays for itself in a step or two.
        """
        taken = [slot for slot, request in enumerate(self.slots) if request is not None]
        for target in range(len(taken)):
            if self.slots[target] is None:
                source = taken.pop()
                self.slots[target], self.slots[source] = self.slots[source], None
                self.active[target], self.active[source] = True, False
                yield source, target

    def fail(self, error: EngineError) -> None:
        """End all requests, running and waiting, with an error."""
        failed = [request for _, request in self.running]
        while self.waiting:
            failed.append(self.waiting.popleft())
        self.slots = [None] * len(self.slots)
        self._cancelled.clear()
        for request in failed:
            request.fail(error)

    def _end_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if not request.ended:
                with contextlib.suppress(ValueError):  # it is running
                    self.waiting.remove(request)
                request.cancel()
