"""The protocols of an engine's programs: fill a slot's caches, start it, step all slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.features import Features

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Words = NDArray[np.int32]
Piece: TypeAlias = tuple[int, int]  # the number under which rows are saved, and their count

PREFILL = "prefill"  # the program of a prompt's chunk
SCORE = "score"  # the same; also returns the log-probability of each token's successor
FILL_DRAFTER = "fill_drafter"  # the drafter's part of PREFILL, after steps without drafts
HIDDEN = "hidden"  # its input: hidden states that steps without drafts return
PLAIN, MIXED = "decode", "decode_mixed"  # the programs of a step; MIXED reads the controls
NO_VALUE = -128  # an int8 cache row of numbers that were not finite; C++ has it in cache_rows.h
WEIGHT = "weights.{}"  # name of the input that carries a shared weight


def host_type(dtype: str) -> np.dtype[Any]:
    """Return NumPy's type for a tensor of a manifest; bfloat16 is held as uint16 bits."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def name_program(kind: str, nextn: int, max_nextn: int) -> str:
    """Return the name of the program for steps of `nextn` drafts of up to `max_nextn`."""
    return kind if nextn == max_nextn else f"{kind}_{nextn}"


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of a decode step of all B slots, T = nextn + 1; the next step reuses its arrays.

    In an adaptive engine, nextn is the number of drafts that this step verified and made, not the
    largest number possible.
    """

    tokens: Ints  # [B, T] emitted tokens, -1 beyond num_tokens
    num_tokens: Ints  # [B] 1..T, 0 for an inactive slot
    window: Ints  # [B, T] the step's input tokens: the newest, then the drafts
    num_drafts: Ints  # [B] how many of the window's drafts were real
    logprobs: Floats  # [B, T] log-probability of each emitted token
    margins: Floats  # [B, T] top-1 minus top-2 logit of each row
    # Only the mixed program returns these:
    top_ids: Ints | None = None  # [B, T, MAX_LOGPROBS] most probable tokens of each row
    top_logprobs: Floats | None = None  # [B, T, MAX_LOGPROBS]
    # Of each row's draft, given the drafts before it. An older engine's program has none of them.
    draft_logprobs: Floats | None = None  # [B, T] under the plain softmax
    draft_ranks: Ints | None = None  # [B, T] 1 for the most probable token
    draft_q: Floats | None = None  # [B, T] the probability with which a sampled draft was drawn

    def finite(self, slot: int) -> bool:
        """Tell whether the logits of the slot's emitted tokens were finite.

        A log-probability is finite only if all logits of its row are, because it contains their
        sum.
        """
        return all(map(isfinite, self.logprobs[slot, : self.num_tokens[slot]].tolist()))


@dataclass(frozen=True, slots=True)
class Constraint:
    """The tokens that a request's grammar allows in its slot's next step; T = nextn + 1."""

    drafts: list[int]  # to verify, up to T - 1
    kept: int  # how many of the drafts are the slot's own; the grammar forces the rest
    allowed: Words  # [T, ceil(V / 32)]: bit t % 32 of word t // 32 allows token t in the row


class Programs(Protocol):
    """The operations of an engine's programs on their state.

    lookahead: the number of tokens after a chunk that `prefill` reads. features: the optional
    operations of these programs; the protocols below have their methods.
    """

    lookahead: int

    @property
    def features(self) -> Features: ...

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        """Fill the slot's caches for positions start .. start + T - 1.

        tokens [T + lookahead]: the chunk and the tokens after it (0 beyond the end of the prompt).
        """

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        """Let the slot decode from `length` committed rows; `newest` is the token after them."""

    def move(self, source: int, target: int) -> None:
        """Move the request of slot `source` to slot `target`, and free `source`.

        The old contents of `target` are lost. Called between steps, for a slot that has begun.
        """

    def finite(self, slot: int, rows: int) -> bool:
        """Tell whether a slot's first rows and its recurrent states are finite."""
        ...

    def clear(self, slot: int) -> None:
        """Make a free slot's values finite; a masked row counts as zero only if it is finite."""

    def step(self, active: Bools, rows: int) -> StepOutput:
        """Verify, accept, rewind and draft in the active slots [B].

        Slots after the last active one need not be computed. They and other inactive slots keep
        their contents.

        rows: at least lengths + T of every active slot, because the step writes T rows in each.
        """
        ...


class Adaptive(Programs, Protocol):
    """Programs that can draft fewer than nextn tokens."""

    def draft(self, nextn: int) -> None:
        """Set the largest number of drafts that steps verify and make, from the next step on.

        The initial value is the largest that the engine supports. A slot's pending drafts after the
        first `nextn` are dropped.
        """
        ...

    def propose(self, slot: int, drafts: Sequence[int], kept: int = 0) -> None:
        """Replace a slot's pending drafts after the first `kept` ones."""
        ...


class Constraining(Programs, Protocol):
    """Programs whose steps can follow a grammar, for requests whose controls say so.

    A step's drafts are read before it is launched, so these programs are never `Overlapping`.
    """

    def drafts(self, slot: int) -> list[int]:
        """Return the drafts that the slot's next step will verify, without the newest token."""
        ...

    def constrain(self, slot: int, constraint: Constraint) -> None:
        """Constrain the slot's next step; each step of a constrained slot needs its own."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a prompt's tokens, under the plain softmax of the logits."""

    logprobs: Floats  # [T]
    ranks: Ints  # [T] 1 for the most probable token of the vocabulary
    top_ids: Ints  # [T, MAX_LOGPROBS]
    top_logprobs: Floats  # [T, MAX_LOGPROBS]


class Scoring(Programs, Protocol):
    """Programs that compute the log-probabilities of a prompt."""

    def score(self, slot: int, start: int, tokens: Ints, following: Ints) -> Scores:
        """Do the work of `prefill`; return the scores of `following` [T], the next tokens."""
        ...


class PrefixCaching(Programs, Protocol):
    """Programs that save copies of rows and recurrent states outside their slots, by number.

    After rows are loaded into a slot, with the recurrent states of their end if the model has any,
    the rest of the prompt is filled in. The last rows are computed again for some drafters.
    """

    def save_rows(self, slot: int, start: int, pieces: Sequence[Piece]) -> bool:
        """Save copies of a slot's rows from `start` on, in pieces, under unused numbers.

        Returns False and saves nothing if they are not finite.
        """
        ...

    def save_states(self, slot: int, number: int) -> bool:
        """Save a copy of a slot's recurrent states under an unused number, if they are finite."""
        ...

    def load_rows(self, slot: int, pieces: Sequence[Piece]) -> None:
        """Fill a slot without a running request with the first rows of saved pieces, in order."""

    def load_states(self, slot: int, number: int) -> None:
        """Set a slot's recurrent states to those that were saved under a number."""

    def discard(self, number: int) -> None:
        """Delete what was saved under a number, if anything."""

    def saved(self, number: int) -> Mapping[str, NDArray[Any]]:
        """Return the rows [rows, width] or the states that were saved under a number, by name.

        Programs that other processes run too need neither this method nor `adopt`.
        """
        ...

    def adopt(self, number: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep arrays, as `saved` returns them, under an unused number; they must not change."""


class Shared(Programs, Protocol):
    """Programs that other processes run too; the next call notices that a process has ended."""

    def close(self) -> None:
        """Tell the other processes that there will be no more calls."""
        ...

    @property
    def failure(self) -> str | None:
        """The reason why no more calls are possible; None while all processes seem to run."""
        ...


class Overlapping(Programs, Protocol):
    """Programs that can launch a step before the output of the last step is read."""

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        """Launch a step; the result, when called, waits for the step and returns its output.

        Steps and operations on slots run in the order of their calls. A result need not be called.
        The second launch after a step reuses its arrays, so at most two outputs are valid at once.

        rows: as for `step`; assume T tokens for a step that was launched and not read.
        """
        ...
