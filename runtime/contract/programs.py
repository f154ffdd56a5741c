"""The protocol that the loop asks of a target: fill a slot's caches, start it, step all slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.controls import GREEDY, Controls
from mtpbuild.runtime.contract.features import Features

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Words = NDArray[np.int32]
Piece: TypeAlias = tuple[int, int, int]  # a number under which rows are kept, the first, how many

PREFILL = "prefill"  # the program of a prompt's chunk
SCORE = "score"  # the same, with the log-probabilities of the tokens behind
PLAIN, MIXED = "decode", "decode_mixed"  # the programs of a step
WEIGHT = "weights.{}"  # the input by which a program is given a weight that others read, too


def host_type(dtype: str) -> np.dtype[Any]:
    """NumPy's type for a manifest's tensor. It has no bfloat16, which is held as bits."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def program_name(kind: str, nextn: int, most: int) -> str:
    """Returns the program for steps of `nextn` drafts, in an engine for up to `most`."""
    return kind if nextn == most else f"{kind}_{nextn}"


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Is one decode step of all B slots; T = nextn + 1. The arrays are reused by the next step.

    In an adaptive engine, nextn is what the step judged and made, not the most there can be.
    """

    tokens: Ints  # [B, T] emitted tokens, -1 beyond num_tokens
    num_tokens: Ints  # [B] 1..T, 0 for an inactive slot
    window: Ints  # [B, T] the tokens that were judged: the newest, then the drafts
    num_drafts: Ints  # [B] how many of the window's drafts were real
    logprobs: Floats  # [B, T] log-probability of each emitted token
    margins: Floats  # [B, T] top-1 minus top-2 logit of each row
    # The mixed program alone gives these:
    top_ids: Ints | None = None  # [B, T, MAX_LOGPROBS] most probable tokens of each row
    top_logprobs: Floats | None = None  # [B, T, MAX_LOGPROBS]

    def finite(self, slot: int) -> bool:
        """Tells whether the logits behind the slot's tokens were finite.

        A log-probability is a number only if its row's logits are: it holds the sum of all.
        """
        return bool(np.isfinite(self.logprobs[slot, : self.num_tokens[slot]]).all())


@dataclass(frozen=True, slots=True)
class Constraint:
    """Says what a slot may emit in its next step, by its request's grammar; T = nextn + 1."""

    drafts: list[int]  # that are judged, up to T - 1
    kept: int  # how many of them the slot has already; those behind are certain to be accepted
    allowed: Words  # [T, ceil(V / 32)]: bit t % 32 of word t // 32 allows token t in the row


class Programs(Protocol):
    """Declares what an engine's programs do with their state.

    lookahead: how many tokens behind a chunk prefill wants to see. features: what these programs
    can do besides; each feature's methods are in a protocol below.
    """

    lookahead: int

    @property
    def features(self) -> Features: ...

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        """Fill the slot's caches for positions start .. start + T - 1.

        tokens [T + lookahead]: the chunk and the tokens behind it (0 where the prompt has ended).
        """

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        """Make the slot decode: `length` rows are committed, `newest` is the token behind them."""

    def move(self, source: int, target: int) -> None:
        """Make slot `target`, whatever it held, go on where `source` is; `source` is then free.

        Between steps, for a slot that has begun.
        """

    def finite(self, slot: int, rows: int) -> bool:
        """Tell whether a slot's first rows, and its recurrent states, are finite."""
        ...

    def clear(self, slot: int) -> None:
        """Make all that a free slot holds finite: masked rows count as zeros only if they are."""

    def step(self, active: Bools, rows: int) -> StepOutput:
        """Verify, accept, rewind and draft in the active slots [B].

        Slots behind the last active one need not be computed. They, and inactive ones, keep what
        they hold.

        rows: at least lengths + T of every active slot, as the step writes T rows in each.
        """
        ...


class Adaptive(Programs, Protocol):
    """Are programs that need not draft nextn tokens."""

    def draft(self, nextn: int) -> None:
        """Judge and make so many drafts at most from the next step on; at first as many as can be.

        Of the drafts that a slot holds, those behind the first `nextn` are dropped.
        """
        ...


class Constraining(Programs, Protocol):
    """Are programs whose steps can be held to a grammar, for requests whose controls say so.

    What a step has drafted is read before the next one is launched, so they are not `Overlapping`.
    """

    def drafts(self, slot: int) -> list[int]:
        """Returns the drafts that the slot's next step will judge, behind the newest token."""
        ...

    def constrain(self, slot: int, constraint: Constraint) -> None:
        """Hold the slot's next step to a constraint; each step of such a slot has its own."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Says what a prompt's tokens were to the model, under the plain softmax of its logits."""

    logprobs: Floats  # [T]
    ranks: Ints  # [T] 1 for the most probable token of the vocabulary
    top_ids: Ints  # [T, MAX_LOGPROBS]
    top_logprobs: Floats  # [T, MAX_LOGPROBS]


class Scoring(Programs, Protocol):
    """Are programs that say how probable a prompt is."""

    def score(self, slot: int, start: int, tokens: Ints, following: Ints) -> Scores:
        """Do what `prefill` does; returns the scores of `following` [T], a token behind each."""
        ...


class Keeping(Programs, Protocol):
    """Are programs whose slots keep cache rows behind the last active slot, for other prompts.

    A prompt may be filled in from any position whose earlier rows its slot holds, less `lookahead`.
    """

    def copy(self, source: int, target: int, rows: int) -> None:
        """Make the first rows of slot `target`'s caches those of slot `source`'s."""

    def swap(self, source: int, target: int) -> None:
        """Do what `move` does, and give slot `source` the cache rows that `target` had."""


class Pooling(Programs, Protocol):
    """Are programs that keep copies of rows and recurrent states beside their slots, by number.

    A prompt may be filled in from any position whose rows, and states if there are any, its slot
    has been given, less what its drafter carries besides.
    """

    def save_rows(self, number: int, slot: int, start: int, stop: int) -> None:
        """Keep a copy of rows start .. stop - 1 of a slot under a number that is free."""

    def save_states(self, number: int, slot: int) -> None:
        """Keep a copy of a slot's recurrent states."""

    def load_rows(self, slot: int, pieces: Sequence[Piece]) -> None:
        """Make the first rows of a slot that nobody runs in those of all pieces, in order."""

    def load_states(self, slot: int, number: int) -> None:
        """Make a slot's recurrent states those that are kept under a number."""

    def discard(self, number: int) -> None:
        """Forget what is kept under a number."""

    def saved(self, number: int) -> Mapping[str, NDArray[Any]]:
        """Show what is kept under a number: rows [rows, width] or states by their names.

        Programs that other processes run too need not have this, nor `adopt`.
        """
        ...

    def adopt(self, number: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep arrays under a number that is free, as `saved` shows them; nobody writes to them."""


class Shared(Programs, Protocol):
    """Are programs that other processes run too; these may end before the next call finds out."""

    def close(self) -> None:
        """Tell the others that nothing will be called again."""
        ...

    @property
    def failure(self) -> str | None:
        """Says why nothing can be called any more; None while all are there, as far as is known."""
        ...


class Overlapping(Programs, Protocol):
    """Are programs that can be given the next step before the last one's tokens were read."""

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        """Begin a step; the result waits for it and gives what it emitted.

        Steps run in the order of their launch, and with what is asked of slots between them.
        A result need not be called; its arrays are reused by the second launch after it, so two
        steps at most are of use at a time.

        rows: as for `step`, where a step that was launched and not read may have emitted T tokens.
        """
        ...
