"""The prefix cache of the loop: rows that slots still have, and rows in the pool."""

from typing import cast

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Keeping, Pooling, Programs
from mtpbuild.runtime.prefix_pool import PrefixPool
from mtpbuild.runtime.prefix_tree import Found
from mtpbuild.runtime.prefixes import Placement, Prefixes
from mtpbuild.runtime.request import Request
from mtpbuild.runtime.scheduler import Filling, Scheduler

MADE_ANEW = frozenset({"lengths", "window", "num_drafts", "thinking", "draft_probs", "history"})


class PrefixCache:
    """A cache that looks up known prefixes of prompts and keeps the rows of ended requests.

    slots: whether to reuse rows of free slots, if the programs keep them. pool: copies of rows and
    recurrent states outside the slots, if there is one.
    """

    def __init__(
        self, programs: Programs, manifest: Manifest, *, slots: bool, pool: PrefixPool | None
    ) -> None:
        self._programs = programs
        self.slots: Prefixes | None = None
        if slots and Feature.KEEP in programs.features:
            self.slots = Prefixes(programs.lookahead, spare=manifest.build.prefill_chunk)
        self.pool = pool
        self.queries = self.hits = 0  # tokens of prompts that were looked up; those that were found
        # Some drafters carry values that depend on the last rows; prompts compute these rows again.
        carried = {s.name for s in manifest.state if s.role in ("carry", "history")}
        self._refilled = programs.lookahead if carried - MADE_ANEW else 0

    def place(self, filling: Filling, scheduler: Scheduler) -> None:
        """Load the known rows of a request's prompt into its slot.

        If that raises, it is unknown which rows the slots have, so all are forgotten.
        """
        try:
            self._place(filling, scheduler)
        except BaseException:
            self.forget_slots()
            raise

    def _place(self, filling: Filling, scheduler: Scheduler) -> None:
        request, slot = filling.request, filling.slot
        scored = request.params.prompt_logprobs is not None  # such a prompt is filled in completely
        prompt, salt = [] if scored else request.prompt, request.params.cache_salt or ""
        found = Found()
        if self.pool is not None:
            found = self.pool.find(prompt, len(prompt) - 1 - self._refilled, salt)
        filling.at = found.rows
        if self.slots is not None:
            held = scheduler.held(salt, besides=slot)
            free = sorted([slot, *scheduler.free(0)])
            placement = self.slots.place(prompt, slot, free, held, salt, found.rows + 1)
            filling.at = max(filling.at, placement.common)
            self._arrange(placement, slot)
        if filling.at == found.rows > 0:
            programs = cast(Pooling, self._programs)
            programs.load_rows(slot, found.pieces)
            if found.states is not None:
                programs.load_states(slot, found.states)
        if self.slots is not None or self.pool is not None:
            self.queries += len(prompt)
        self.hits += filling.at
        request.cached_tokens = filling.at

    def end_of_chunk(self, filling: Filling, chunk: int) -> int:
        """Return the end of a prompt's next chunk.

        With recurrent states a chunk also ends at the last position whose states other prompts can
        reuse.
        """
        end = min(filling.at + chunk, filling.end)
        border = filling.end - self._refilled
        return border if self._has_states and filling.at < border < end else end

    def filled(self, filling: Filling) -> None:
        """Keep the states after a filled-in chunk, before the next chunk overwrites them."""
        request, at = filling.request, filling.at
        if self._has_states and self.pool is not None and 0 < at <= filling.end - self._refilled:
            salt = request.params.cache_salt or ""
            self.pool.add(filling.slot, request.prompt, at, salt, states=True)

    def release(self, slot: int, request: Request, rows: int) -> None:
        """Keep the rows that an ended request left in its slot."""
        tokens, salt = request.prompt + request.token_ids, request.params.cache_salt or ""
        if self.pool is not None:
            self.pool.add(slot, tokens, rows, salt)
        if self.slots is not None:
            self.slots.keep(slot, tokens[:rows], salt)

    def move(self, source: int, target: int) -> None:
        """Move a running request to another slot; forget all rows if that raises."""
        try:
            if self.slots is not None and self.slots.holds(target):
                cast(Keeping, self._programs).swap(source, target)
            else:
                self._programs.move(source, target)
        except BaseException:
            self.forget_slots()
            raise
        if self.slots is not None:
            self.slots.exchange(source, target)

    def forget_slots(self) -> None:
        """Forget the rows of all slots."""
        if self.slots is not None:
            self.slots.clear()

    def forget(self) -> None:
        """Forget everything but the prefixes that the engine was built with."""
        self.forget_slots()
        if self.pool is not None:
            self.pool.clear()

    def close(self) -> None:
        """Wait until the folder's files are written."""
        if self.pool is not None:
            self.pool.close()

    @property
    def _has_states(self) -> bool:
        return self.pool is not None and self.pool.recurrent

    def _arrange(self, placement: Placement, slot: int) -> None:
        """Move and copy rows of slots before a prompt is filled in."""
        assert self.slots is not None
        programs = cast(Keeping, self._programs)
        if placement.saved_to >= 0 and (self.pool is None or self.pool.limit == 0):
            rows = self.slots.save(slot, placement.saved_to)
            programs.copy(slot, placement.saved_to, rows)
        if placement.taken and placement.source != slot:
            programs.swap(placement.source, slot)
            self.slots.exchange(placement.source, slot)
        elif placement.source >= 0 and not placement.taken:
            programs.copy(placement.source, slot, placement.common)
        self.slots.drop(slot)
