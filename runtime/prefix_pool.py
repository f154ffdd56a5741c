"""Keeps rows and recurrent states of earlier prompts beside the slots, in a tree of tokens."""

import heapq
import itertools
import logging
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Piece, Pooling, Programs, host_type
from mtpbuild.runtime.contract.state import StateSpec
from mtpbuild.runtime.free_memory import free_memory
from mtpbuild.runtime.prefixes import common

log = logging.getLogger("mtpbuild")
BLOCK = 64  # rows that are kept, and given up, together
SHARE = 8  # the free memory is divided by it, unless a size is given
SPARE = 64  # entries of the heap that may be out of date, besides as many as are not


@dataclass(slots=True, eq=False)
class Kept:
    """What programs keep under a number for a block of the tree: rows, or recurrent states."""

    parent: "Block | None"
    number: int  # -1: it is gone
    size: int  # bytes that count in the pool
    used: int = 0  # when, on a clock that ticks with each request
    pinned: bool = False  # it stays, whatever is used
    # Makes sure that what comes from a file is whole and there, before its first use.
    ready: Callable[[], bool] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing depends on it."""
        return True


@dataclass(slots=True, eq=False)
class Block(Kept):
    """Up to `BLOCK` rows. `tokens` are those of its rows, and the `lookahead` behind them.

    The modules' last rows have seen these, so a block is of use only where they are the same. Only
    a full block is followed by others. states: those behind so many of its rows.
    """

    tokens: tuple[int, ...] = ()
    first: int = 0  # of its rows, among those that have its number
    followers: "list[Block]" = field(default_factory=list)  # in the order of their tokens
    states: dict[int, Kept] = field(default_factory=dict)

    @property
    def is_free(self) -> bool:
        return not (self.followers or self.states)

    def nearest(self, tokens: tuple[int, ...]) -> "tuple[Block | None, int]":
        """The follower that has most of the first tokens, and how many."""
        at = bisect_left(self.followers, tokens, key=_tokens)
        near = self.followers[max(0, at - 1) : at + 1]
        found = [(common(tokens, block.tokens), block) for block in near]
        shared, block = max(found, key=lambda each: each[0], default=(0, None))
        return block, shared


@dataclass(frozen=True, slots=True)
class Found:
    """Where the first rows of a prompt are, and its recurrent states behind them."""

    rows: int = 0
    pieces: tuple[Piece, ...] = ()
    states: int | None = None


class PrefixPool:
    """A tree over tokens, whose blocks are rows that the programs keep, in so many bytes.

    The rows of a prompt are those of a path from the root. What was used longest ago is given up
    first, and never before what follows it. Each salt has a tree of its own, and no request
    finds anything in another one.
    """

    def __init__(self, programs: Pooling, manifest: Manifest, limit: int) -> None:
        self._programs, self.limit = programs, limit
        self.lookahead = programs.lookahead
        rows = [s for s in manifest.state if s.role == "rows"]
        states = [s for s in manifest.state if s.role == "recurrent"]
        self._row_size = sum(_size(s, s.sizes["width"]) for s in rows)
        self._states_size = sum(_size(s, math.prod(s.shape[1:])) for s in states)
        self.recurrent = bool(states)
        self.used = 0  # bytes
        self._numbers = itertools.count()
        self._roots: dict[str, Block] = {}
        self._clock = 0
        self._order: list[tuple[int, int, Kept]] = []  # a heap; an entry may be out of date
        self._entries = itertools.count()
        self._count = 0  # of what is kept and not pinned

    def find(self, prompt: Sequence[int], most: int, salt: str = "") -> Found:
        """Where the first rows of a prompt are, `most` at most."""
        self._clock += 1
        path, states = self._path(prompt, most, salt)
        for kept in (*(block for block, _ in path), states):
            if kept is not None and not self._use(kept):
                return self.find(prompt, most, salt)
        pieces = list[Piece]()
        for block, rows in path:
            number, first, count = pieces[-1] if pieces else (-1, 0, 0)
            if (block.number, block.first) == (number, first + count):
                pieces[-1] = number, first, count + rows
            else:
                pieces.append((block.number, block.first, rows))
        total = sum(rows for _, rows in path)
        return Found(total, tuple(pieces), None if states is None else states.number)

    def add(
        self, slot: int, tokens: Sequence[int], rows: int, salt: str = "", *, states: bool = False
    ) -> None:
        """Keep the first rows of a slot, as far as they are final, and its states behind them.

        tokens: all that are known, also behind the rows. What is there already is not copied.
        """

        def make(parent: Block, start: int, own: tuple[int, ...]) -> Block | None:
            count = len(own) - self.lookahead
            size = self._row_size * count
            if not self._make_room(size):
                return None
            number = next(self._numbers)
            self._programs.save_rows(number, slot, start, start + count)
            return Block(parent, number, size, tokens=own)

        rows = min(rows, len(tokens) - self.lookahead)
        last = self._insert(tokens, rows, salt, make)
        behind = rows - (rows - 1) // BLOCK * BLOCK
        if not states or rows <= 0 or last is None or behind in last.states:
            return
        if self._make_room(self._states_size):
            kept = Kept(last, next(self._numbers), self._states_size, self._clock)
            self._programs.save_states(kept.number, slot)
            last.states[behind] = kept
            self._kept(kept)

    def pin(
        self,
        tokens: Sequence[int],
        rows: int,
        number: int,
        states: Mapping[int, int],
        ready: Callable[[], bool],
    ) -> None:
        """Hold rows that programs have under a number, and states behind some, for ever."""

        def make(parent: Block, start: int, own: tuple[int, ...]) -> Block:
            return Block(parent, number, 0, tokens=own, first=start, pinned=True, ready=ready)

        self._insert(tokens, rows, "", make)
        for behind, other in states.items():
            last = self._insert(tokens, behind, "", make)
            assert last is not None
            place = behind - (behind - 1) // BLOCK * BLOCK
            last.states[place] = Kept(last, other, 0, pinned=True, ready=ready)

    def number(self) -> int:
        """A number under which programs keep nothing yet."""
        return next(self._numbers)

    def clear(self) -> None:
        """Give up all that is not pinned."""
        for kept in reversed([*self.contents()]):
            if not kept.pinned and kept.is_free:
                self._drop(kept)

    def contents(self) -> Iterator[Kept]:
        """All blocks and states; what something depends on comes before it."""
        yield from _below(*self._roots.values())

    def _path(
        self, prompt: Sequence[int], most: int, salt: str
    ) -> tuple[list[tuple[Block, int]], Kept | None]:
        """The longest path whose rows are a prompt's; with recurrent states, up to some of them."""
        path, best = list[tuple[Block, int]](), list[tuple[Block, int]]()
        node, at, states = self._roots.get(salt), 0, None
        while node is not None and at < most:
            tokens = tuple(prompt[at : at + BLOCK + self.lookahead])
            for block in node.followers if self.recurrent else ():
                usable = min(common(tokens, block.tokens) - self.lookahead, most - at)
                if (rows := max((r for r in block.states if r <= usable), default=0)) > 0:
                    best, states = [*path, (block, rows)], block.states[rows]
            near, shared = node.nearest(tokens)
            rows = min(shared - self.lookahead, most - at)
            if near is None or rows <= 0:
                break
            path.append((near, rows))
            at += rows
            node = near if rows == BLOCK else None
        return (best, states) if self.recurrent else (path, None)

    def _insert(
        self,
        tokens: Sequence[int],
        rows: int,
        salt: str,
        make: Callable[[Block, int, tuple[int, ...]], Block | None],
    ) -> Block | None:
        """Add the blocks of a path that are missing; returns its last one, None without room."""
        self._clock += 1
        root = block = self._roots.get(salt) or Block(None, 0, 0, pinned=True)
        for start in range(0, rows, BLOCK):
            stop = min(start + BLOCK, rows)
            own = tuple(tokens[start : stop + self.lookahead])
            near, shared = block.nearest(own)
            if near is None or shared < len(own):
                made = make(block, start, own)
                if made is None:
                    return None
                if near is not None and shared == len(near.tokens):
                    self._replace(near, made)
                insort(block.followers, made, key=_tokens)
                self._roots[salt] = root  # giving up what was in it, we may have forgotten it
                near = made
                made.used = self._clock
                self._kept(made)
            near.used, block = self._clock, near
        return block

    def _replace(self, shorter: Block, block: Block) -> None:
        """A block that begins as another one, and goes on, takes its place."""
        if shorter.pinned or shorter.number < 0:
            return
        block.states, shorter.states = shorter.states, {}
        for kept in block.states.values():
            kept.parent = block
        self._drop(shorter)

    def _use(self, kept: Kept) -> bool:
        """It is used now; False, and all that depends on it is gone, if its file is damaged."""
        if kept.ready is not None and not kept.ready():
            for other in reversed([*_below(kept)]):
                self._drop(other)
            return False
        kept.ready, kept.used = None, self._clock
        return True

    def _kept(self, kept: Kept) -> None:
        """Count what is kept from now on."""
        self.used += kept.size
        self._count += not kept.pinned
        self._offer(kept)

    def _offer(self, kept: Kept) -> None:
        """It may be given up when its turn comes."""
        if kept.pinned:
            return
        heapq.heappush(self._order, (kept.used, next(self._entries), kept))
        if len(self._order) > 2 * self._count + SPARE:
            free = (k for k in self.contents() if k.is_free and not k.pinned)
            self._order = [(k.used, next(self._entries), k) for k in free]
            heapq.heapify(self._order)

    def _make_room(self, size: int) -> bool:
        """Give up what was used longest ago; False if that would be what is used just now."""
        while self.used + size > self.limit:
            if not self._order:
                return False
            used, _, kept = heapq.heappop(self._order)
            if kept.number < 0 or not kept.is_free:
                continue  # it is gone, or will be offered again when nothing depends on it
            if kept.used == used < self._clock:
                self._drop(kept)
                continue
            self._offer(kept)
            if used == self._clock:
                return False
        return True

    def _drop(self, kept: Kept) -> None:
        """Forget something on which nothing depends."""
        parent = kept.parent
        assert parent is not None
        if isinstance(kept, Block):
            parent.followers.remove(kept)
        else:
            parent.states = {n: other for n, other in parent.states.items() if other is not kept}
        self.used -= kept.size
        if not kept.pinned:
            self._count -= 1
            self._programs.discard(kept.number)
        kept.number = -1
        if parent.is_free and parent.parent is not None:
            self._offer(parent)
        elif parent.is_free:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}


def make_pool(programs: Programs, manifest: Manifest, limit: int | None) -> PrefixPool | None:
    """A pool of so many bytes (None: a share of the free ones), where the programs can have one."""
    if Feature.POOL not in programs.features:
        return None
    size = free_memory() // SHARE if limit is None else limit
    log.info("prefixes may take %.1f MB of memory (--prefix-cache-bytes)", size / 1e6)
    return PrefixPool(cast(Pooling, programs), manifest, size)


def _below(*found: Kept) -> Iterator[Kept]:
    """These, but for roots, and all that depends on them; what is depended on comes first."""
    waiting = [*found]
    while waiting:
        kept = waiting.pop()
        if kept.parent is not None:
            yield kept
        if isinstance(kept, Block):
            waiting += [*kept.states.values(), *kept.followers]


def _tokens(block: Block) -> tuple[int, ...]:
    return block.tokens


def _size(spec: StateSpec, count: int) -> int:
    return count * host_type(spec.dtype).itemsize
