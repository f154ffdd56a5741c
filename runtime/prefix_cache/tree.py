"""The tree of token blocks whose rows are saved, and the order in which they are evicted."""

import hashlib
import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from mtpbuild.runtime.contract.state import BLOCK

Match: TypeAlias = "list[tuple[Block, int]]"  # blocks from a root on, and how many rows of each
get_tokens = attrgetter("tokens")  # of a block


class RowSpan(NamedTuple):
    """The tokens of some rows of a prompt, and the `lookahead` tokens after them."""

    parent: str  # key of the block before the rows, or of a root
    start: int  # the number of rows before these
    tokens: tuple[int, ...]
    states: bool = False  # whether it is the span of recurrent states after the rows

    @property
    def key(self) -> str:
        """The name of its file in a folder."""
        text = f"{self.parent} {int(self.states)} {','.join(map(str, self.tokens))}"
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(slots=True, eq=False)
class CacheEntry:
    """Rows or recurrent states that are saved under a number."""

    parent: "Block | None"
    span: RowSpan
    key: str
    number: int
    size: int  # bytes that count towards the tree's limit
    pinned: bool = False  # never evicted
    used: int = 0  # the tree's round in which it was last used
    # Loads and checks the file that the content comes from, before its first use.
    load: Callable[[], bool] | None = None


@dataclass(slots=True, eq=False)
class Block(CacheEntry):
    """Up to `BLOCK` rows.

    A row of an MTP module depends on the `lookahead` tokens after it, so the block can be used only
    if the tokens after its rows are the same too. Only a full block has followers. states:
    recurrent states by the number of the block's rows before them.
    """

    followers: "list[Block]" = field(default_factory=list)  # sorted by their tokens
    states: dict[int, CacheEntry] = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.span.tokens

    def nearest(self, tokens: tuple[int, ...]) -> "tuple[Block | None, int]":
        """Return the follower that begins with most of the tokens, and how many those are."""
        at = bisect_left(self.followers, tokens, key=get_tokens)
        near = self.followers[max(0, at - 1) : at + 1]
        if near and near[-1].tokens[: len(tokens)] == tokens:
            return near[-1], len(tokens)
        matches = [(count_common(tokens, block.tokens), block) for block in near]
        shared, block = max(matches, key=lambda match: match[0], default=(0, None))
        return block, shared

    def covering(self, tokens: tuple[int, ...]) -> "Block | None":
        """Return the follower that begins with the tokens."""
        near, shared = self.nearest(tokens)
        return near if shared == len(tokens) else None


class PrefixTree:
    """Blocks of earlier prompts' tokens; their saved rows and states have at most `limit` bytes.

    A path from a root has the rows of a prompt. Each salt has its own root, and requests find
    nothing under other roots. evict: deletes what is saved for an entry.
    """

    def __init__(self, limit: int, lookahead: int, evict: Callable[[CacheEntry], None]) -> None:
        self.limit, self.lookahead, self._evict = limit, lookahead, evict
        self.used = 0  # bytes
        self.roots: dict[str, Block] = {}
        # Entries that can be evicted: the least recently used first, children before their parents.
        self._order: OrderedDict[CacheEntry, None] = OrderedDict()
        self._round = 0
        self._numbers = itertools.count()

    def find(
        self, tokens: Sequence[int], max_rows: int, salt: str, *, states: bool = False
    ) -> tuple[Match, CacheEntry | None]:
        """Return the path of a prompt's first rows, at most `max_rows` of them.

        states: end the path at recurrent states, and return them, too.
        """
        path, last = self._find_longest_path(tokens, max_rows, salt, states)
        for entry in (*(block for block, _ in path), last):
            if entry is not None and entry.load is not None:
                if not entry.load():
                    self.drop(entry)
                    return self.find(tokens, max_rows, salt, states=states)
                entry.load = None
        self._round += 1
        self.use(last or (path[-1][0] if path else None))
        return path, last

    def grow(
        self,
        tokens: Sequence[int],
        rows: int,
        salt: str,
        row_size: int,
        *,
        pinned: bool = False,
    ) -> tuple[list[Block], int]:
        """Add the missing blocks of a path, as far as there is room.

        tokens: those of the path's rows and at least `lookahead` more. Returns the path's blocks,
        and how many of them are not new.
        """
        self._round += 1
        parts = [
            tuple(tokens[start : min(start + BLOCK, rows) + self.lookahead])
            for start in range(0, rows, BLOCK)
        ]
        block, path = self.root(make_root_key(salt)), list[Block]()
        for part in parts:
            if (follower := block.covering(part)) is None:
                break
            path.append(block := follower)
        self.use(block)
        for part in parts[(known := len(path)) :]:
            size = row_size * (len(part) - self.lookahead)
            if not self.make_room(size):
                break
            shorter, shared = block.nearest(part)  # a block that the new one extends is replaced
            path.append(block := self.add_block(block, part, size, pinned=pinned))
            if shorter is not None and shared == len(shorter.tokens) and not shorter.pinned:
                block.states, shorter.states = shorter.states, {}
                for entry in block.states.values():
                    entry.parent = block
                self.drop(shorter)
        self.use(block)
        return path, known

    def add_block(
        self, parent: Block, tokens: tuple[int, ...], size: int, *, pinned: bool = False
    ) -> Block:
        """Add a block, for which there must be room, after a parent."""
        start = parent.span.start + (0 if parent.parent is None else BLOCK)
        span = RowSpan(parent.key, start, tokens)
        block = Block(parent, span, span.key, next(self._numbers), size, pinned)
        insort(parent.followers, block, key=get_tokens)
        if parent.parent is None:
            self.roots[parent.key] = parent
        self._count(block)
        return block

    def add_states(self, block: Block, rows: int, size: int, *, pinned: bool = False) -> CacheEntry:
        """Add recurrent states, for which there must be room, after some of a block's rows."""
        span = block.span._replace(tokens=block.tokens[: rows + self.lookahead], states=True)
        entry = CacheEntry(block, span, span.key, next(self._numbers), size, pinned)
        block.states[rows] = entry
        self._count(entry)
        return entry

    def make_room(self, size: int) -> bool:
        """Evict least recently used entries; return False if this round uses all that are left."""
        while self.used + size > self.limit:
            oldest = next(iter(self._order), None)
            if oldest is None or oldest.used == self._round:
                return False
            self.drop(oldest)
        return True

    def use(self, entry: CacheEntry | None) -> None:
        """Mark an entry and the path to it as used in this round."""
        while entry is not None:
            entry.used = self._round
            if entry in self._order:
                self._order.move_to_end(entry)
            entry = entry.parent

    def drop(self, entry: CacheEntry) -> None:
        """Evict an entry and all entries that depend on it."""
        parent = entry.parent
        assert parent is not None
        if isinstance(entry, Block):
            parent.followers.remove(entry)
        else:
            parent.states = {n: other for n, other in parent.states.items() if other is not entry}
        for dropped in [*walk_below(entry)]:
            self._order.pop(dropped, None)
            self.used -= dropped.size
            self._evict(dropped)
        if parent.parent is None and not parent.followers:
            self.roots.pop(parent.key, None)

    def clear(self) -> None:
        """Evict everything that is not pinned."""
        while self._order:
            self.drop(next(iter(self._order)))

    def sort(self, oldest_first: Iterable[CacheEntry]) -> None:
        """Set the order in which entries were used, and evict what exceeds the limit."""
        for entry in oldest_first:
            self._round += 1
            if not (isinstance(entry, Block) and (entry.followers or entry.states)):
                self.use(entry)
        self._round += 1
        self.make_room(0)

    def entries(self) -> Iterator[CacheEntry]:
        """Yield all blocks and states, parents before children."""
        yield from walk_below(*self.roots.values())

    def root(self, key: str) -> Block:
        """Return a root by its key; a new one is in the tree only once it has a block."""
        return self.roots.get(key) or Block(None, RowSpan("", 0, ()), key, 0, 0, pinned=True)

    def _find_longest_path(
        self, tokens: Sequence[int], max_rows: int, salt: str, states: bool
    ) -> tuple[Match, CacheEntry | None]:
        path, best = list[tuple[Block, int]](), list[tuple[Block, int]]()
        node: Block | None = self.root(make_root_key(salt))
        at, last = 0, None
        while node is not None and at < max_rows:
            following = tuple(tokens[at : at + BLOCK + self.lookahead])
            for block in node.followers if states else ():
                usable = min(count_common(following, block.tokens) - self.lookahead, max_rows - at)
                if (rows := max((r for r in block.states if r <= usable), default=0)) > 0:
                    best, last = [*path, (block, rows)], block.states[rows]
            near, shared = node.nearest(following)
            rows = min(shared - self.lookahead, max_rows - at)
            if near is None or rows <= 0:
                break
            path.append((near, rows))
            at += rows
            node = near if rows == BLOCK else None
        return (best, last) if states else (path, None)

    def _count(self, entry: CacheEntry) -> None:
        self.used += entry.size
        entry.used = self._round
        if not entry.pinned:
            self._order[entry] = None


def make_root_key(salt: str) -> str:
    return hashlib.sha256(salt.encode()).hexdigest()


def walk_below(*entries: CacheEntry) -> Iterator[CacheEntry]:
    """Yield entries, but no roots, and all that depend on them, parents before children."""
    pending = [*entries]
    while pending:
        entry = pending.pop()
        if entry.parent is not None:
            yield entry
        if isinstance(entry, Block):
            pending += [*entry.states.values(), *entry.followers]


def count_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens at the start of two sequences."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))
