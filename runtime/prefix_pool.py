"""A pool of rows and recurrent states of earlier prompts outside the slots, as a tree of tokens."""

import contextlib
import heapq
import itertools
import logging
import math
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Piece, Pooling, Programs, host_type
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.free_memory import free_memory
from mtpbuild.runtime.prefix_folder import PrefixFolder
from mtpbuild.runtime.prefix_tree import (
    BLOCK,
    Block,
    Entry,
    Found,
    Kept,
    below,
    block_tokens,
    entry_key,
    root_key,
)
from mtpbuild.runtime.prefixes import common
from mtpbuild.runtime.targets import targets_with

log = logging.getLogger("mtpbuild")
SHARE = 8  # by default the pool may take this fraction of the free memory: 1 / SHARE
SPARE = 64  # outdated heap entries that are allowed in addition to the number of valid ones


class PrefixPool:
    """A tree of token blocks whose rows the programs save, up to a number of bytes.

    A path from the root has the rows of a prompt. The least recently used leaves are evicted first.
    Each salt has its own tree, and requests find nothing in the trees of other salts.
    """

    def __init__(
        self,
        programs: Pooling,
        manifest: Manifest,
        limit: int,
        folder: PrefixFolder | None = None,
    ) -> None:
        self._programs, self.limit = programs, limit
        self.lookahead = programs.lookahead
        self._row_size, self._states_size = kept_sizes(manifest)
        self.recurrent = self._states_size > 0
        self.used = 0  # bytes
        self._numbers = itertools.count()
        self._roots: dict[str, Block] = {}
        self._clock = 0
        self._order: list[tuple[int, int, Kept]] = []  # a heap, with some outdated entries
        self._entries = itertools.count()
        self._count = 0  # of blocks and states that are not pinned
        self._folder = folder

    def find(self, prompt: Sequence[int], most: int, salt: str = "") -> Found:
        """Return the places of a prompt's first rows, at most `most` of them."""
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
        """Save the first rows of a slot, as far as they are final, and its states after them.

        tokens: all known tokens, including those after the rows. Rows that the pool has are not
        copied.
        """

        def make(parent: Block, start: int, own: tuple[int, ...]) -> Block | None:
            count = len(own) - self.lookahead
            size = self._row_size * count
            if not self._make_room(size):
                return None
            number = next(self._numbers)
            with self._discarding(number):
                self._programs.save_rows(number, slot, start, start + count)
            return Block(parent, number, size, tokens=own)

        rows = min(rows, len(tokens) - self.lookahead)
        last = self._insert(tokens, rows, salt, make)
        behind = rows - (rows - 1) // BLOCK * BLOCK
        if not states or rows <= 0 or last is None or behind in last.states:
            return
        if self._make_room(self._states_size):
            kept = Kept(last, next(self._numbers), self._states_size, self._clock)
            with self._discarding(kept.number):
                self._programs.save_states(kept.number, slot)
            last.states[behind] = kept
            self._kept(kept, behind)

    @contextlib.contextmanager
    def _discarding(self, number: int) -> Iterator[None]:
        """Discard what is saved under a number if the block raises."""
        try:
            yield
        except BaseException:
            self._programs.discard(number)
            raise

    def pin(
        self,
        tokens: Sequence[int],
        rows: int,
        number: int,
        states: Mapping[int, int],
        ready: Callable[[], bool],
    ) -> None:
        """Pin rows that programs have under a number, and the states after some of them."""

        def make(parent: Block, start: int, own: tuple[int, ...]) -> Block:
            return Block(parent, number, 0, tokens=own, first=start, pinned=True, ready=ready)

        self._insert(tokens, rows, "", make)
        for behind, other in states.items():
            last = self._insert(tokens, behind, "", make)
            assert last is not None
            place = behind - (behind - 1) // BLOCK * BLOCK
            last.states[place] = Kept(last, other, 0, pinned=True, ready=ready)

    def number(self) -> int:
        """Return a number under which programs have nothing saved."""
        return next(self._numbers)

    def restore(self) -> None:
        """Add the entries that earlier processes left in the folder; they are read on first use."""
        assert self._folder is not None
        blocks = {
            k.key: k for k in (*self._roots.values(), *self.contents()) if isinstance(k, Block)
        }
        waiting = dict[str, list[tuple[int, Entry]]]()
        for age, entry in enumerate(self._folder.entries()):
            waiting.setdefault(entry.parent, []).append((age, entry))
            self._clock = age + 1
            if entry.top and entry.parent not in blocks:
                root = Block(None, 0, 0, pinned=True, key=entry.parent)
                blocks[entry.parent] = self._roots[entry.parent] = root
        ready = [*blocks]
        while ready:
            for age, entry in waiting.pop(parent := ready.pop(), ()):
                kept = self._restored(entry, blocks[parent], age)
                if isinstance(kept, Block):
                    blocks[kept.key] = kept
                    ready.append(kept.key)
        for _, entry in itertools.chain(*waiting.values()):
            self._folder.delete(entry.key)  # its parent is gone
        self._make_room(0)
        log.info("%d blocks of prefixes were left by earlier processes", self._count)

    def _restored(self, entry: Entry, parent: Block, used: int) -> Kept:
        number, folder = next(self._numbers), self._folder
        assert folder is not None

        def ready() -> bool:
            arrays = folder.read(entry.key)
            if arrays is not None:
                self._programs.adopt(number, arrays)
            return arrays is not None

        if entry.behind:
            kept = Kept(parent, number, self._states_size, used, ready=ready, key=entry.key)
            parent.states[entry.behind] = kept
        else:
            size = self._row_size * (len(entry.tokens) - self.lookahead)
            kept = Block(parent, number, size, used, tokens=entry.tokens, key=entry.key)
            kept.ready = ready
            insort(parent.followers, kept, key=block_tokens)
        self.used += kept.size
        self._count += 1
        self._offer(kept)
        return kept

    def close(self) -> None:
        """Wait until the folder's files are written."""
        if self._folder is not None:
            self._folder.close()

    def clear(self) -> None:
        """Evict everything that is not pinned."""
        for kept in reversed([*self.contents()]):
            if not kept.pinned and kept.is_free:
                self._drop(kept)

    def contents(self) -> Iterator[Kept]:
        """Yield all blocks and states, parents before children."""
        yield from below(*self._roots.values())

    def _path(
        self, prompt: Sequence[int], most: int, salt: str
    ) -> tuple[list[tuple[Block, int]], Kept | None]:
        """Return the longest path with a prompt's rows; it must end at states if there are any."""
        path, best = list[tuple[Block, int]](), list[tuple[Block, int]]()
        node, at, states = self._roots.get(root_key(salt)), 0, None
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
        """Add the missing blocks of a path; return its last block, or None if there is no room."""
        self._clock += 1
        name = root_key(salt)
        root = block = self._roots.get(name) or Block(None, 0, 0, pinned=True, key=name)
        for start in range(0, rows, BLOCK):
            stop = min(start + BLOCK, rows)
            own = tuple(tokens[start : stop + self.lookahead])
            near, shared = block.nearest(own)
            if near is None or shared < len(own):
                made = make(block, start, own)
                if made is None:
                    return None
                insort(block.followers, made, key=block_tokens)
                self._roots[name] = root  # eviction may have dropped an empty root
                made.used = self._clock
                self._kept(made)
                if near is not None and shared == len(near.tokens):
                    self._replace(near, made)
                near = made
            near.used, block = self._clock, near
        return block

    def _replace(self, shorter: Block, block: Block) -> None:
        """Replace a block by one that begins with the same tokens and is longer."""
        if shorter.pinned or shorter.number < 0:
            return
        block.states, shorter.states = shorter.states, {}
        self._drop(shorter)
        for behind, kept in block.states.items():
            kept.parent = block
            if self._folder is not None:
                self._folder.delete(kept.key)
                self._write(kept, behind)

    def _use(self, kept: Kept) -> bool:
        """Mark as used; if its file is damaged, drop it with all dependents and return False."""
        if kept.ready is not None and not kept.ready():
            for other in reversed([*below(kept)]):
                self._drop(other)
            return False
        kept.ready, kept.used = None, self._clock
        return True

    def _kept(self, kept: Kept, behind: int = 0) -> None:
        """Count a new entry, write it to the folder and make it evictable.

        behind: the number of its block's rows before a state.
        """
        self.used += kept.size
        self._count += not kept.pinned
        self._write(kept, behind)
        self._offer(kept)

    def _write(self, kept: Kept, behind: int) -> None:
        if self._folder is None or kept.parent is None:
            return
        parent, tokens = kept.parent, kept.tokens if isinstance(kept, Block) else ()
        kept.key = entry_key(parent.key, tokens, behind)
        if kept.pinned:
            return
        entry = Entry(kept.key, parent.key, tokens, behind, parent.parent is None)
        if kept.ready is None:
            self._folder.write(entry, self._programs.saved(kept.number))

    def _offer(self, kept: Kept) -> None:
        """Make an entry evictable, unless it is pinned."""
        if kept.pinned:
            return
        heapq.heappush(self._order, (kept.used, next(self._entries), kept))
        if len(self._order) > 2 * self._count + SPARE:
            free = (k for k in self.contents() if k.is_free and not k.pinned)
            self._order = [(k.used, next(self._entries), k) for k in free]
            heapq.heapify(self._order)

    def _make_room(self, size: int) -> bool:
        """Evict least recently used entries; return False if only those in use are left."""
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
        """Drop an entry on which nothing depends."""
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
            if self._folder is not None:
                self._folder.delete(kept.key)
        kept.number = -1
        if parent.is_free and parent.parent is not None:
            self._offer(parent)
        elif parent.is_free:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}


def make_pool(
    programs: Programs, manifest: Manifest, limit: int | None, folder: str | Path | None = None
) -> PrefixPool | None:
    """Return a pool of `limit` bytes, or None if the programs cannot have one.

    limit: None for a share of the free memory. folder: keeps the pool's content after this process.
    Raises UsageError if there is a folder and the programs cannot have a pool.
    """
    if folder is not None and Feature.SHARE in programs.features:
        raise UsageError("--prefix-cache-dir: not for engines of several ranks; leave it out")
    if Feature.POOL not in programs.features:
        if folder is not None:
            raise UsageError(f"--prefix-cache-dir is for engines of {targets_with(Feature.POOL)}")
        return None
    size = free_memory() // SHARE if limit is None else limit
    log.info("prefixes may take %.1f MB of memory (--prefix-cache-bytes)", size / 1e6)
    files = None if folder is None else PrefixFolder(Path(folder), manifest)
    return PrefixPool(cast(Pooling, programs), manifest, size, files)


def kept_sizes(manifest: Manifest) -> tuple[int, int]:
    """Return the bytes of a token's rows in all caches, and of a slot's recurrent states."""
    size = {"rows": 0, "recurrent": 0}
    for spec in manifest.state:
        if spec.role in size:
            count = spec.sizes["width"] if spec.role == "rows" else math.prod(spec.shape[1:])
            size[spec.role] += count * host_type(spec.dtype).itemsize
    return size["rows"], size["recurrent"]
