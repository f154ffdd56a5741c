"""The scheduler knows which request is in which slot, and who is next."""

import contextlib
from collections import deque
from collections.abc import Iterator

import numpy as np

from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.programs.base import Bools
from mtpbuild.runtime.request import Request


class Scheduler:
    """B slots and a queue. Any thread may `add` and `cancel`; only the loop does the rest.

    ranks: how many have requests of their own. Each has an equal number of the slots, one rank's
    behind the other's, and a request stays on the rank where it began.
    """

    def __init__(self, slots: int, ranks: int = 1) -> None:
        self.slots: list[Request | None] = [None] * slots
        own = slots // ranks
        self._ranks = [range(first, first + own) for first in range(0, slots, own)]
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
            if request is not None and request.ended:
                self.slots[slot] = None
        while self.waiting and (free := self._free_slot()) is not None:
            self.slots[free] = newcomer = self.waiting.popleft()
            yield free, newcomer
        self.active[:] = [request is not None for request in self.slots]

    def close_gaps(self) -> Iterator[tuple[int, int]]:
        """Yield moves (source, target) that leave a rank no free slot below a request.

        A step computes every slot up to the last one, so a move pays for itself in a step or two.
        """
        for rank in self._ranks:
            taken = [slot for slot in rank if self.slots[slot] is not None]
            for target in rank[: len(taken)]:
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

    def _free_slot(self) -> int | None:
        """The lowest free slot of the rank with the fewest requests; None if all are taken."""
        free = [[slot for slot in rank if self.slots[slot] is None] for rank in self._ranks]
        most = max(free, key=len)
        return most[0] if most else None

    def _end_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if not request.ended:
                with contextlib.suppress(ValueError):  # it is running
                    self.waiting.remove(request)
                request.cancel()
