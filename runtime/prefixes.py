"""The rows of prompts that free slots still have, and the choice of those that a prompt reuses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class KeptRows:
    """The rows of a slot without a running request: row p belongs to token p of `tokens`."""

    tokens: Sequence[int] = ()
    salt: str = ""  # of the request that left the rows
    used: int = 0  # time of the last use, on a clock that ticks with each request


@dataclass(frozen=True, slots=True)
class Placement:
    """The changes to slots before a prompt is filled in.

    First the slot's rows are copied to `saved_to` (-1: they are not worth it). Then the first
    `common` rows of slot `source` are copied to the slot, or, if `taken`, the two slots are
    swapped.
    """

    saved_to: int = -1
    source: int = -1  # -1: no rows are reused
    common: int = 0
    taken: bool = False


@dataclass(slots=True)
class Prefixes:
    """The rows of all slots without a running request.

    lookahead: how many tokens after a row the MTP modules have seen. After `common` equal tokens
    that many rows fewer are reused, and the drafter's carried values are computed again with the
    rest. spare: how many kept rows a prompt may overwrite when it takes over a slot.
    """

    lookahead: int
    spare: int = 0
    _rows: dict[int, KeptRows] = field(default_factory=dict)
    _clock: int = 0

    def keep(self, slot: int, tokens: Sequence[int], salt: str = "") -> None:
        """Record a slot that became free, and the tokens of its first rows."""
        self._clock += 1
        self._rows[slot] = KeptRows(tokens, salt, self._clock)

    def holds(self, slot: int) -> bool:
        return slot in self._rows

    def save(self, slot: int, to: int) -> int:
        """Record a copy of the slot's rows to another slot; return the number of rows."""
        self._rows[to] = self._rows[slot]
        return len(self._rows[to].tokens)

    def exchange(self, source: int, target: int) -> None:
        """Record a swap of two slots."""
        held = {source: self._rows.pop(target, None), target: self._rows.pop(source, None)}
        self._rows |= {slot: rows for slot, rows in held.items() if rows}

    def drop(self, slot: int) -> None:
        """Forget the rows of a slot, which are overwritten now."""
        self._rows.pop(slot, None)

    def clear(self) -> None:
        self._rows.clear()

    def place(
        self,
        prompt: Sequence[int],
        slot: int,
        free: Sequence[int],
        taken: Iterable[tuple[int, Sequence[int]]],
        salt: str = "",
        least: int = 1,
    ) -> Placement:
        """Choose the rows that a prompt in slot `slot` begins with.

        free: slots without a request, including `slot`. taken: the other slots with the tokens of
        their rows. salt: of the request; rows with another salt are not used. least: fewer rows are
        not worth it.

        A prompt that extends nearly all rows of a free slot takes over that slot. Other rows, and
        those of running requests, are copied, and the rows of `slot` are first saved to the free
        slot that was used longest ago.
        """
        own = {s: self._rows[s] for s in free if s in self._rows and self._rows[s].salt == salt}
        held = [(s, kept.tokens) for s, kept in own.items()]
        found = [(common(prompt[:-1], tokens), s) for s, tokens in (*held, *taken)]
        most, source = max(found, default=(0, -1))
        most = max(0, most - self.lookahead)
        if most < least:
            return Placement(self._oldest(slot, free))
        kept = self._rows[source] if source in free else KeptRows()
        if source in free and len(kept.tokens) - most <= self.lookahead + self.spare:
            return Placement(source=source, common=most, taken=True)
        self._clock += 1
        kept.used = self._clock
        saved_to = self._oldest(slot, [s for s in free if s != source])
        return Placement(saved_to, source, most, taken=source == slot)

    def _oldest(self, slot: int, free: Sequence[int]) -> int:
        """Return the free slot used longest ago, to save the rows of `slot`; -1: do not save."""
        oldest = min(free, key=lambda s: (self._rows.get(s, KeptRows()).used, s), default=slot)
        return -1 if oldest == slot or slot not in self._rows else oldest


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens at the start of two sequences."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))
