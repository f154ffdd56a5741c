"""The tree of token blocks in a prefix pool, and their keys in a folder."""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mtpbuild.runtime.contract.programs import Piece
from mtpbuild.runtime.prefixes import common

BLOCK = 64  # rows that are kept and evicted together


@dataclass(slots=True, eq=False)
class Kept:
    """Rows or recurrent states that programs saved under a number for a block of the tree."""

    parent: "Block | None"
    number: int  # -1: discarded
    size: int  # bytes that count towards the pool's limit
    used: int = 0  # time of the last use, on a clock that ticks with each request
    pinned: bool = False  # never evicted
    # Loads and checks the file that the content comes from, before its first use.
    ready: Callable[[], bool] | None = None
    key: str = ""  # of its file, if the pool has a folder

    @property
    def is_free(self) -> bool:
        """Tell whether nothing depends on it."""
        return True


@dataclass(slots=True, eq=False)
class Block(Kept):
    """Up to `BLOCK` rows. `tokens` are those of the rows and the `lookahead` tokens after them.

    The last rows of MTP modules depend on these later tokens, so a block can be used only if they
    are the same. Only a full block has followers. states: recurrent states by the number of the
    block's rows before them.
    """

    tokens: tuple[int, ...] = ()
    first: int = 0  # the block's first row among the rows saved under its number
    followers: "list[Block]" = field(default_factory=list)  # sorted by their tokens
    states: dict[int, Kept] = field(default_factory=dict)

    @property
    def is_free(self) -> bool:
        return not (self.followers or self.states)

    def nearest(self, tokens: tuple[int, ...]) -> "tuple[Block | None, int]":
        """Return the follower that shares most of the first tokens, and their number."""
        at = bisect_left(self.followers, tokens, key=block_tokens)
        near = self.followers[max(0, at - 1) : at + 1]
        found = [(common(tokens, block.tokens), block) for block in near]
        shared, block = max(found, key=lambda each: each[0], default=(0, None))
        return block, shared


@dataclass(frozen=True, slots=True)
class Found:
    """The places where a prompt's first rows and the recurrent states after them are saved."""

    rows: int = 0
    pieces: tuple[Piece, ...] = ()
    states: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """The description of a folder's file: a block, or the states after some rows of its parent."""

    key: str
    parent: str
    tokens: tuple[int, ...] = ()  # of a block
    behind: int = 0  # rows of the parent before the states; 0: a block
    top: bool = False  # whether its parent is a root

    @property
    def fits(self) -> bool:
        """Tell whether its key matches its content."""
        return self.key == entry_key(self.parent, self.tokens, self.behind)


def entry_key(parent: str, tokens: tuple[int, ...], behind: int) -> str:
    said = f"{parent} {behind} {','.join(map(str, tokens))}"
    return hashlib.sha256(said.encode()).hexdigest()


def below(*found: Kept) -> Iterator[Kept]:
    """Yield these, except roots, and everything that depends on them, parents before children."""
    waiting = [*found]
    while waiting:
        kept = waiting.pop()
        if kept.parent is not None:
            yield kept
        if isinstance(kept, Block):
            waiting += [*kept.states.values(), *kept.followers]


def root_key(salt: str) -> str:
    return hashlib.sha256(salt.encode()).hexdigest()


def block_tokens(block: Block) -> tuple[int, ...]:
    return block.tokens
