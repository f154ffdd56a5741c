"""The scheduler knows who is in which slot, whose prompt is being filled in, and who is next."""

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mtpbuild.runtime.contract.programs import Bools
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.request import Request


@dataclass(slots=True, eq=False)
class Filling:
    """Is a request whose prompt is being filled in, all but its last token, which a step takes."""

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
    """Holds B slots and a queue. Any thread may `add` and `cancel`; only the loop does the rest.

    Prompts are filled in in the order in which they came, one at a time, and take turns with steps:
    a chunk, a step, a chunk. So a prompt of any length delays who runs by a chunk per step.

    ranks: how many have requests of their own. Each has an equal number of the slots, one rank's
    behind the other's, and a request stays on the rank where it began. Each fills in a prompt of
    its own.
    """

    def __init__(self, slots: int, ranks: int = 1) -> None:
        self.slots: list[Request | None] = [None] * slots
        own = slots // ranks
        self._ranks = [range(first, first + own) for first in range(0, slots, own)]
        self._filling: list[Filling | None] = [None] * ranks
        self.waiting: deque[Request] = deque()
        self.active: Bools = np.zeros(slots, np.bool_)  # [B] slots that a step advances
        self._cancelled: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ask for the end of a request; it ends before the next step."""
        if not request.ended:
            request.cancelled = True
            self._cancelled.append(request)

    @property
    def admitted(self) -> list[Request]:
        """Returns the requests that have a slot and have not ended."""
        return [r for r in self.slots if r is not None and not r.ended]

    @property
    def running(self) -> list[tuple[int, Request]]:
        """Returns those that a step advances, with their slots."""
        found = ((s, r) for s, r in enumerate(self.slots) if r is not None and not r.ended)
        return [(s, r) for s, r in found if self.active[s]]

    def release(self) -> list[tuple[int, Request, int]]:
        """Free the slots of requests that have ended; return these, and how many rows they have."""
        self.end_cancelled()
        filled = {f.slot: f.at for f in self._filling if f}
        seats = [(s, r) for s, r in enumerate(self.slots) if r is not None and r.ended]
        for slot, _ in seats:
            self.slots[slot], self.active[slot] = None, False
        self._filling = [f if f and self.slots[f.slot] else None for f in self._filling]
        return [(slot, request, filled.get(slot, request.length)) for slot, request in seats]

    def turns(self) -> Iterator[Filling]:
        """Yield whose prompts may go on now, by a chunk each: one of each rank at most.

        The loop says with `begin` that a prompt is whole. If it needed no chunk, the next one has
        the same turn.
        """
        for rank in sorted(range(len(self._ranks)), key=lambda rank: -len(self.free(rank))):
            while filling := self._filling[rank] or self._admit(rank):
                needed = filling.at
                yield filling
                if not filling.done or filling.at > needed:
                    break

    def begin(self, filling: Filling) -> None:
        """The prompt is whole: steps advance the slot from now on."""
        self._filling[self._rank_of(filling.slot)] = None
        self.active[filling.slot] = True

    def drop(self, filling: Filling) -> None:
        """Fill in no more of a prompt whose request has ended."""
        self._filling[self._rank_of(filling.slot)] = None

    def close_gaps(self) -> Iterator[tuple[int, int, Request]]:
        """Yield moves that leave a rank no free slot below one that steps advance.

        Each has the slot that a request leaves, its new one, and the request.

        A step computes every slot up to the last one, so a move pays for itself in a step or two.
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
        """Returns the slots of a rank that nobody has."""
        return [slot for slot in self._ranks[rank] if self.slots[slot] is None]

    def held(self, salt: str, *, besides: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the other slots that requests of a salt have, and the tokens of their rows."""
        filled = {f.slot: f.at for f in self._filling if f}
        for slot, request in enumerate(self.slots):
            if request is None or slot == besides:
                continue
            if (request.params.cache_salt or "") == salt:
                rows = filled.get(slot, request.length)
                yield slot, (request.prompt + request.token_ids)[:rows]

    def _admit(self, rank: int) -> Filling | None:
        """Give the next who waits the lowest free slot of a rank."""
        free = self.free(rank)
        if not self.waiting or not free:
            return None
        filling = Filling(free[0], self.waiting.popleft())
        self.slots[filling.slot], self._filling[rank] = filling.request, filling
        return filling

    def _rank_of(self, slot: int) -> int:
        return slot // len(self._ranks[0])

    def end_cancelled(self) -> None:
        """End those that were asked to end; between steps."""
        while self._cancelled:
            request = self._cancelled.popleft()
            if not request.ended:
                with contextlib.suppress(ValueError):  # it is running
                    self.waiting.remove(request)
                with request.contain():
                    request.end("cancelled")
