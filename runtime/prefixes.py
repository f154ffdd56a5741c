"""Which slot still holds the rows of which tokens, and what a new prompt takes of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class KeptRows:
    """Holds the rows of a slot that no request runs in: row p belongs to token p of `tokens`."""

    tokens: Sequence[int] = ()
    salt: str = ""  # of the request whose rows they are
    used: int = 0  # when, on a clock that ticks with each request


@dataclass(frozen=True, slots=True)
class Placement:
    """Says what happens to a slot before a prompt is filled in there.

    Its rows go to `saved_to` first (-1: nobody wants them). Then the `common` first rows of slot
    `source` are copied to it, or, if `taken`, the two slots are exchanged.
    """

    saved_to: int = -1
    source: int = -1  # -1: there is nothing to begin with
    common: int = 0
    taken: bool = False


@dataclass(slots=True)
class Prefixes:
    """Knows the rows of all slots that nobody runs in.

    lookahead: how many tokens behind a row its modules have seen. Of `common` equal tokens so many
    rows fewer are of use, and what a drafter carries besides is made again with the rest. spare:
    how many rows a prompt may cost the one that it goes on from.
    """

    lookahead: int
    spare: int = 0
    _rows: dict[int, KeptRows] = field(default_factory=dict)
    _clock: int = 0

    def keep(self, slot: int, tokens: Sequence[int], salt: str = "") -> None:
        """The slot is free; its first rows are those of these tokens."""
        self._clock += 1
        self._rows[slot] = KeptRows(tokens, salt, self._clock)

    def holds(self, slot: int) -> bool:
        return slot in self._rows

    def save(self, slot: int, to: int) -> int:
        """The slot's rows are copied to another one; returns how many."""
        self._rows[to] = self._rows[slot]
        return len(self._rows[to].tokens)

    def exchange(self, source: int, target: int) -> None:
        """What the slots hold has changed places."""
        held = {source: self._rows.pop(target, None), target: self._rows.pop(source, None)}
        self._rows |= {slot: rows for slot, rows in held.items() if rows}

    def drop(self, slot: int) -> None:
        """Somebody else's rows are in the slot now."""
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
        """Says where a prompt that will run in `slot` finds its first rows.

        free: slots that nobody has, `slot` among them. taken: the others, and the tokens of their
        rows. salt: of the request; rows of another one don't count. least: fewer rows are not worth
        it. Kept rows that the prompt goes on from are taken, but for a few; of others, and of those
        that are in use, a copy is made, over the free rows that were used longest ago.
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
        """Finds the free slot whose rows give way to those of `slot`; -1: its own, or none."""
        oldest = min(free, key=lambda s: (self._rows.get(s, KeptRows()).used, s), default=slot)
        return -1 if oldest == slot or slot not in self._rows else oldest


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Says how many tokens two sequences begin with that are the same."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))
