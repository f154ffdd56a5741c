"""The prefix cache: it saves rows of prompts and loads them for prompts that begin alike."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import PrefixCaching, Programs, host_type
from mtpbuild.runtime.contract.state import BLOCK, CACHED
from mtpbuild.runtime.contract.targets import list_targets_with
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.limits import measure_limits
from mtpbuild.runtime.prefix_cache.files import Arrays, PrefixFile, list_prefix_names, open_prefixes
from mtpbuild.runtime.prefix_cache.folder import PrefixFolder
from mtpbuild.runtime.prefix_cache.tree import Block, CacheEntry, PrefixTree
from mtpbuild.runtime.requests.request import Request
from mtpbuild.runtime.requests.scheduler import Filling

log = logging.getLogger("mtpbuild")
SHARE = 8  # by default the cache may take this fraction of the free memory: 1 / SHARE
# Carries that need no prompt: a request's begin writes them, or a step before they are read.
NOT_FROM_PROMPT = frozenset(
    {"lengths", "window", "num_drafts", "thinking", "draft_probs", "history"}
)


class PrefixCache:
    """Copies of rows and recurrent states of earlier prompts, in memory that programs manage.

    limit: bytes of entries that requests leave; with 0, only `pin` adds entries. folder: keeps the
    entries of requests for later processes.
    """

    def __init__(
        self,
        programs: PrefixCaching,
        manifest: Manifest,
        limit: int,
        folder: PrefixFolder | None = None,
    ) -> None:
        self._programs, self._folder = programs, folder
        self.tree = PrefixTree(limit, programs.lookahead, self._evict)
        self.queries = self.hits = 0  # tokens of prompts: looked up, and found
        self._row_size, self._states_size = count_saved_bytes(manifest)
        self._overwrites = any(s.role == "window" for s in manifest.state)
        self.recurrent = self._states_size > 0
        # Some drafters carry values from a prompt's last rows, which are then filled in again.
        carried = {s.name for s in manifest.state if s.role in ("carry", "history")}
        self._refilled = programs.lookahead if carried - NOT_FROM_PROMPT else 0

    def load(self, filling: Filling) -> None:
        """Load the saved rows of a request's prompt into its slot."""
        request, slot = filling.request, filling.slot
        scored = request.params.prompt_logprobs is not None  # such a prompt is filled in completely
        prompt, salt = [] if scored else request.prompt, request.params.cache_salt or ""
        max_rows = len(prompt) - 1 - self._refilled
        path, states = self.tree.find(prompt, max_rows, salt, states=self.recurrent)
        if path:
            self._programs.load_rows(slot, [(block.number, rows) for block, rows in path])
        if states is not None:
            self._programs.load_states(slot, states.number)
        filling.at = request.cached_tokens = sum(rows for _, rows in path)
        self.queries += len(prompt)
        self.hits += filling.at

    def end_of_chunk(self, filling: Filling, end: int) -> int:
        """Return the end of a prompt's next chunk, at most `end`.

        With recurrent states a chunk also ends at the last position whose states other prompts can
        reuse.
        """
        last = self._find_last_states(filling)
        return last if self.recurrent and filling.at < last < end else end

    def save_chunk(self, filling: Filling) -> None:
        """Save the full blocks that a chunk completed; at the end of the prompt also the rest.

        Recurrent states are saved after each chunk, as the next chunk overwrites them.
        """
        request = filling.request
        rows = min(filling.at, len(request.prompt) - self.tree.lookahead)
        states = self.recurrent and filling.at <= self._find_last_states(filling)
        if not (states or filling.done):
            rows -= rows % BLOCK
        self.save(filling.slot, request.prompt, rows, request, states=states)

    def save_step(self, slot: int, request: Request, count: int) -> None:
        """Save the block that the last `count` rows of an answer completed, if rows are lost.

        Later steps overwrite the rows of layers with a window.
        """
        rows = request.length
        if self._overwrites and rows // BLOCK > (rows - count) // BLOCK:
            tokens = request.prompt + request.token_ids
            self.save(slot, tokens, rows - rows % BLOCK, request)

    def clear(self) -> None:
        """Drop all entries except the engine's own prefixes."""
        self.tree.clear()

    def close(self) -> None:
        """Wait until the folder's files are written."""
        if self._folder is not None:
            self._folder.close()

    def pin(self, file: PrefixFile) -> None:
        """Add a prefix of the engine, which is never evicted; its hash is checked at first use."""
        tokens, rows, states = file.span.tokens, file.rows, file.states
        path, known = self.tree.grow(tokens, len(tokens) - self.tree.lookahead, "", 0, pinned=True)
        for block in path[known:]:
            span = slice(block.span.start, block.span.start + self._count_rows(block))
            self._adopt(block, {name: array[span] for name, array in rows.items()}, file)
        for count, arrays in states.items():
            block = path[(count - 1) // BLOCK]
            if (rows_before := count - block.span.start) not in block.states:
                entry = self.tree.add_states(block, rows_before, 0, pinned=True)
                self._adopt(entry, arrays, file)

    def restore(self, folder: PrefixFolder) -> None:
        """Add the entries that earlier processes left in the folder; they are read on first use."""
        tree, spans, restored = self.tree, [*folder.spans()], dict[int, CacheEntry]()
        blocks = {e.key: e for e in tree.entries() if isinstance(e, Block)}
        # Parents come before their children, blocks before their states; age 0 is the oldest.
        for age in sorted(range(len(spans)), key=lambda age: (spans[age].start, spans[age].states)):
            span, rows = spans[age], len(spans[age].tokens) - tree.lookahead
            parent = blocks.get(span.parent) or (None if span.start else tree.root(span.parent))
            block = None if parent is None else parent.covering(span.tokens)
            if span.states and block is not None and rows not in block.states:
                restored[age] = tree.add_states(block, rows, self._states_size)
            elif not span.states and parent is not None and block is None:
                size = self._row_size * rows
                restored[age] = blocks[span.key] = tree.add_block(parent, span.tokens, size)
            else:  # its parent is missing, or another entry has its rows
                folder.delete(span.key)
                continue
            restored[age].load = partial(self._read, folder, restored[age])
        tree.sort(restored[age] for age in sorted(restored))
        log.info("%d blocks of prefixes were left by earlier processes", len(restored))

    def save(
        self, slot: int, tokens: Sequence[int], rows: int, request: Request, *, states: bool = False
    ) -> None:
        """Save a slot's first rows, as far as they are final, and with `states` its states.

        tokens: all known tokens, including those after the rows. Rows that are saved already are
        not copied; rows that are not finite are not saved.
        """
        rows = min(rows, len(tokens) - self.tree.lookahead)
        if self.tree.limit == 0 or rows <= 0:
            return
        path, known = self.tree.grow(tokens, rows, request.params.cache_salt or "", self._row_size)
        if new := path[known:]:
            pieces = [(block.number, self._count_rows(block)) for block in new]
            save = partial(self._programs.save_rows, slot, new[0].span.start, pieces)
            if not self._keep(new, save):
                return
        if not states or len(path) * BLOCK < rows:  # there was no room
            return
        last = path[-1]
        rows_before = rows - last.span.start
        if rows_before not in last.states and self.tree.make_room(self._states_size):
            entry = self.tree.add_states(last, rows_before, self._states_size)
            self._keep([entry], partial(self._programs.save_states, slot, entry.number))

    def _keep(self, entries: Sequence[CacheEntry], save: Callable[[], bool]) -> bool:
        """Fill new entries, the first and its descendants, by `save`; drop them if it fails."""
        saved = False
        try:
            saved = save()
        finally:
            if not saved:
                self.tree.drop(entries[0])
        if self._folder is not None and saved:
            for entry in entries:
                self._folder.write(entry, self._programs.saved(entry.number))
        return saved

    def _count_rows(self, block: Block) -> int:
        return len(block.tokens) - self.tree.lookahead

    def _find_last_states(self, filling: Filling) -> int:
        """Return the last position of a prompt whose recurrent states other prompts can reuse."""
        return min(filling.end - self._refilled, len(filling.request.prompt) - self.tree.lookahead)

    def _evict(self, entry: CacheEntry) -> None:
        self._programs.discard(entry.number)
        if self._folder is not None and not entry.pinned:
            self._folder.delete(entry.key)

    def _adopt(self, entry: CacheEntry, arrays: Arrays, file: PrefixFile) -> None:
        self._programs.adopt(entry.number, arrays)
        entry.load = lambda: file.is_usable

    def _read(self, folder: PrefixFolder, entry: CacheEntry) -> bool:
        """Read an entry's file; return False if it is damaged."""
        if (arrays := folder.read(entry.key)) is None:
            return False
        self._programs.adopt(entry.number, arrays)
        return True


def open_prefix_cache(
    programs: Programs,
    manifest: Manifest,
    folder: Path,
    limit: int | None,
    rows_folder: str | Path | None = None,
) -> PrefixCache | None:
    """Return a cache of `limit` bytes with an engine's prefixes and the entries of a folder.

    limit: None for `choose_default_limit`. Returns None if the programs can't have a cache, or if
    the limit is 0 and there are neither prefixes nor a folder. Raises UsageError for a wrong
    folder.
    """
    if rows_folder is not None and Feature.SHARE in programs.features:
        raise UsageError("prefix_cache_dir needs an engine of one rank: leave it out")
    if Feature.PREFIX_CACHE not in programs.features:
        if rows_folder is not None:
            having = list_targets_with(Feature.PREFIX_CACHE)
            raise UsageError(f"prefix_cache_dir needs an engine of {having}: leave it out")
        return None
    if limit == 0 and rows_folder is None and not list_prefix_names(manifest):
        return None
    limit = choose_default_limit(manifest) if limit is None else limit
    log.info("prefixes may take %.1f MB of memory (prefix_cache_bytes)", limit / 1e6)
    opened = None if rows_folder is None else PrefixFolder(Path(rows_folder), manifest)
    cache = PrefixCache(cast(PrefixCaching, programs), manifest, limit, opened)
    try:
        for _, file in open_prefixes(folder, manifest):
            cache.pin(file)
        if opened is not None:
            cache.restore(opened)
    except BaseException:
        cache.close()  # unlocks its folder for other processes
        raise
    return cache


def choose_default_limit(manifest: Manifest) -> int:
    """Return a share of the free memory, or more if a conversation of full length needs more.

    Each rank saves its own rows, and all ranks may be on this machine.
    """
    row, states = count_saved_bytes(manifest)
    free = measure_limits().free // manifest.build.tp
    return max(free // SHARE, min(free // 2, row * manifest.build.max_seq_len + states))


def count_saved_bytes(manifest: Manifest) -> tuple[int, int]:
    """Return the bytes of a token's rows in all caches, and of a slot's recurrent states."""
    rows = states = 0
    for spec in manifest.state:
        item = host_type(spec.dtype).itemsize
        rows += item * spec.sizes["width"] if spec.role in CACHED else 0
        states += item * math.prod(spec.shape[1:]) if spec.role == "recurrent" else 0
    return rows, states
