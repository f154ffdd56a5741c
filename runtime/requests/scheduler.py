"""The scheduler: it gives slots to requests and decides whose prompt is filled in next."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mtpbuild.runtime.contract.programs import Bools
from mtpbuild.runtime.errors import DeadlineError, EngineError
from mtpbuild.runtime.requests.request import Request


@dataclass(slots=True, eq=False)
class Filling:
    """A prompt that is being filled in, except its last token, which the first step takes."""

    slot: int
    request: Request
    at: int = 0  # the next position

    @property
    def end(self) -> int:
        return len(self.request.prompt) - 1

    @property
    def done(self) -> bool:
        return self.at >= self.end


class Scheduler:
    """B slots and a queue.

    Threads other than the loop's call only `add` and `cancel`, and `end_cancelled` while no thread
    steps.

    Prompts are filled in one at a time in the order of their arrival, and alternate with steps: a
    chunk, a step, a chunk. So a prompt of any length delays running requests by one chunk per step.

    ranks: the number of ranks with requests of their own. Each rank has an equal range of the
    slots and fills in prompts of its own. A request stays on the rank where it began.
    """

    def __init__(self, slots: int, ranks: int = 1) -> None:
        self.slots: list[Request | None] = [None] * slots
        per_rank = slots // ranks
        self._ranks = [range(first, first + per_rank) for first in range(0, slots, per_rank)]
        self._filling: list[Filling | None] = [None] * ranks
        self.waiting: deque[Request] = deque()
        self.active: Bools = np.zeros(slots, np.bool_)  # [B] slots that steps advance
        self._cancelled: deque[Request] = deque()
        self._timed: deque[Request] = deque()  # those with a deadline

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        if request.deadline is not None:
            self._timed.append(request)

    def cancel(self, request: Request) -> None:
        """Ask for the end of a request; it ends before the next step."""
        if not request.ended:
            request.cancelled = True
            self._cancelled.append(request)

    @property
    def admitted(self) -> list[Request]:
        """The requests that have a slot and have not ended."""
        return [r for r in self.slots if r is not None and not r.ended]

    @property
    def idle(self) -> bool:
        """Whether no request waits or has a slot; between steps."""
        return not self.waiting and not self.admitted

    @property
    def running(self) -> list[tuple[int, Request]]:
        """The requests that steps advance, with their slots."""
        active = ((s, r) for s, r in enumerate(self.slots) if self.active[s])
        return [(s, r) for s, r in active if r is not None and not r.ended]

    def release(self) -> list[tuple[int, Request, int]]:
        """Free the slots of ended requests; return slot, request and number of rows of each."""
        self.end_cancelled()
        self._end_overdue()
        filled = {f.slot: f.at for f in self._filling if f}
        ended = [(s, r) for s, r in enumerate(self.slots) if r is not None and r.ended]
        for slot, _ in ended:
            self.slots[slot], self.active[slot] = None, False
        self._filling = [f if f and self.slots[f.slot] else None for f in self._filling]
        return [(slot, request, filled.get(slot, request.length)) for slot, request in ended]

    def turns(self) -> Iterator[Filling]:
        """Yield the prompts of which the loop fills in a chunk now, one chunk per rank.

        The loop calls `begin` for a prompt that is complete. A prompt whose rows were all cached
        needs no chunk, so the rank's next prompt follows at once. Ranks with the most free slots
        come first.
        """
        for rank in sorted(range(len(self._ranks)), key=lambda rank: -len(self.free(rank))):
            while filling := self._filling[rank] or self._admit(rank):
                before = filling.at
                yield filling
                if not filling.done or filling.at > before:
                    break

    def begin(self, filling: Filling) -> None:
        """Let steps advance the slot of a prompt that is complete."""
        self.drop(filling)
        self.active[filling.slot] = True

    def drop(self, filling: Filling) -> None:
        """Stop filling in a prompt that is complete or whose request has ended."""
        self._filling[filling.slot // len(self._ranks[0])] = None

    def close_gaps(self) -> Iterator[tuple[int, int, Request]]:
        """Move active requests to lower free slots of their ranks, and yield each move.

        A move is the request's old slot, its new slot, and the request. A step computes all slots
        up to the last active one, so a move pays for itself in a step or two.
        """
        for rank in self._ranks:
            taken = [slot for slot in rank if self.active[slot]]
            for target in rank[: len(taken)]:
                if self.slots[target] is None:
                    request = self.slots[source := taken.pop()]
                    assert request is not None
                    self.slots[target], self.slots[source] = request, None
                    self.active[target], self.active[source] = True, False
                    yield source, target, request

    def fail(self, error: EngineError) -> None:
        """End all requests, running and waiting, with an error."""
        failed = self.admitted
        while self.waiting:
            failed.append(self.waiting.popleft())
        self.slots, self._filling = [None] * len(self.slots), [None] * len(self._ranks)
        self.active[:] = False
        self._cancelled.clear()
        for request in failed:
            request.fail(error)

    def free(self, rank: int) -> list[int]:
        """Return the free slots of a rank."""
        return [slot for slot in self._ranks[rank] if self.slots[slot] is None]

    def _admit(self, rank: int) -> Filling | None:
        """Give the next waiting request the lowest free slot of a rank."""
        free = self.free(rank)
        if not self.waiting or not free:
            return None
        filling = Filling(free[0], self.waiting.popleft())
        self.slots[filling.slot], self._filling[rank] = filling.request, filling
        return filling

    def end_cancelled(self) -> None:
        """End the cancelled requests; called between steps."""
        while self._cancelled:
            request = self._cancelled.popleft()
            if not request.ended:
                with contextlib.suppress(ValueError):  # it is running
                    self.waiting.remove(request)
                with request.contain():
                    request.end("cancelled")

    def _end_overdue(self) -> None:
        """Fail the requests whose time is over."""
        for _ in range(len(self._timed)):
            request = self._timed.popleft()
            if request.ended:
                continue
            if request.deadline is not None and time.perf_counter() < request.deadline:
                self._timed.append(request)
                continue
            with contextlib.suppress(ValueError):  # it is running
                self.waiting.remove(request)
            late = f"the request took longer than its timeout of {request.params.timeout:g} s"
            request.fail(DeadlineError(late))
