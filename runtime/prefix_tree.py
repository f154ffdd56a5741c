"""The tree of tokens whose blocks a pool keeps, and the keys of these in a folder."""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mtpbuild.runtime.contract.programs import Piece
from mtpbuild.runtime.prefixes import common

BLOCK = 64  # rows that are kept, and given up, together


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
    key: str = ""  # of its file, in a pool that has a folder

    @property
    def is_free(self) -> bool:
        """Tells whether nothing depends on it."""
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
        at = bisect_left(self.followers, tokens, key=block_tokens)
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


@dataclass(frozen=True, slots=True)
class Entry:
    """What a folder's file holds: a block, or the states behind so many rows of its parent."""

    key: str
    parent: str
    tokens: tuple[int, ...] = ()  # of a block
    behind: int = 0  # of states
    top: bool = False  # its parent is a root

    @property
    def fits(self) -> bool:
        """Whether its key is the one that it should have."""
        return self.key == entry_key(self.parent, self.tokens, self.behind)


def entry_key(parent: str, tokens: tuple[int, ...], behind: int) -> str:
    said = f"{parent} {behind} {','.join(map(str, tokens))}"
    return hashlib.sha256(said.encode()).hexdigest()


def below(*found: Kept) -> Iterator[Kept]:
    """These, but for roots, and all that depends on them; what is depended on comes first."""
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
