"""Controls are what a request asks of a step, as the programs, slots and kernels take it.

A new control is a field of `Controls`, or of `Wishes` where users say it as it is. The mixed
program gets it as an input [B, *shape] of that name, a manifest lists it, and every target writes
it when a request begins.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.settings import (
    MAX_BIASES,
    SAMPLED,
    Needs,
    Wishes,
    annotations,
    controls_in,
    defaults_of,
)
from mtpbuild.runtime.contract.settings import MAX_LOGPROBS as MAX_LOGPROBS
from mtpbuild.runtime.contract.settings import Control as Control

MAX_BANNED = 16  # tokens that a request may forbid before its min_tokens
HISTORY = "history"  # the state [B, positions] that penalties count tokens in
NOTHING = -1  # fills a list of ids or rates that is shorter than its place

# Streams of `uniforms`, each numbered by absolute position. Strict draws its target with DRAFT.
DRAFT, ACCEPT, RECOVER = 0, 1, 2
# A block's verdict depends on all its drafts, so the numbers of those it drops are not unseen and
# can't serve again: draft k > 1 has a stream of its own, numbered by the block's first position.
BLOCK_DRAFT = 3

RELAXED = Needs(("relaxed_topk",))
PENALISED = Needs(("presence_penalty", "frequency_penalty", "repetition_penalty", "bias_ids"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls(Wishes):
    """Holds what one request asks of acceptance and drafting; by default strict and greedy."""

    rejection: Annotated[bool, Control("bool", setting="acceptance"), SAMPLED] = False  # or strict
    # Rejection judges a step's drafts together.
    block: Annotated[bool, Control("bool", setting="rejection_sample_method"), SAMPLED] = False
    # Chance of each draft if those before it are accepted; empty: acceptance is real.
    synthetic: Annotated[
        tuple[float, ...], Control("float32", ("window",), setting="rejection_sample_method")
    ] = ()
    # Above temperature 0; else drafts are argmax.
    sampled_drafts: Annotated[bool, Control("bool", setting="draft_sample_method"), SAMPLED] = True
    # They begin and end the thinking phase.
    thinking_ids: Annotated[
        tuple[int, int], Control("int64", (2,), setting="relaxed_topk"), RELAXED
    ] = (-1, -1)
    # These are not emitted at positions before `banned_until`.
    banned_ids: Annotated[
        tuple[int, ...], Control("int64", (MAX_BANNED,), setting="min_tokens")
    ] = ()
    banned_until: Annotated[int, Control("int64", setting="min_tokens"), Needs(("banned_ids",))] = 0
    bias_ids: Annotated[
        tuple[int, ...], Control("int64", (MAX_BIASES,), core=False, setting="logit_bias")
    ] = ()
    bias_values: Annotated[
        tuple[float, ...],
        Control("float32", (MAX_BIASES,), core=False, setting="logit_bias"),
        Needs(("bias_ids",)),
    ] = ()
    # Tokens behind the prompt's are output, to penalties.
    prompt_length: Annotated[int, Control("int64", core=False), PENALISED] = 0
    # A rule of another package, and what the request says of it: control -> value.
    rule: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # The host keeps these: they are no input of a program.
    thinking: Annotated[bool, RELAXED] = False  # whether the prompt ends inside the phase
    alternatives: bool = False  # whether top_ids and top_logprobs are wanted
    constrained: bool = False  # by a grammar, whose masks each step is given anew
    seed: Annotated[int, SAMPLED] = 0
    history: Annotated[tuple[int, ...], PENALISED] = ()  # the prompt, where its tokens are counted

    def counts(self, name: str) -> bool:
        """Tells whether a field counts: neither it nor what it needs is at its default."""
        if getattr(self, name) == _defaults()[name]:
            return False
        needs = _needs().get(name)
        return needs is None or any(map(self.counts, needs.names))

    @property
    def plain(self) -> bool:
        """Strict and greedy, nothing more: the decode program without sampling will do."""
        return not any(map(self.counts, _defaults()))

    @property
    def penalised(self) -> bool:
        """Tells whether the model's logits are edited: by a penalty or by a bias."""
        return any(map(self.counts, PENALISED.names))

    def uniforms(self, count: int, streams: int = BLOCK_DRAFT) -> NDArray[np.float32]:
        """[streams, count] in [0, 1): a function of seed, stream and position alone.

        So the numbers never depend on batch, step or nextn.
        """
        # In a list, numbers from 2**63 on would become floats.
        keys = [np.array([self.seed % 2**64, stream], np.uint64) for stream in range(streams)]
        numbers = (np.random.Generator(np.random.Philox(key=key)) for key in keys)
        return np.stack([each.random(count, np.float32) for each in numbers])

    def rows(
        self, places: Mapping[str, tuple[tuple[int, ...], Any]]
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield what each control of a slot becomes.

        places: shape and dtype of a slot's place in each control that the programs have. A plain
        request draws no numbers: its row of `uniforms` stays as it is.
        """
        for name, (shape, dtype) in places.items():
            if name == UNIFORMS:
                if not self.plain:
                    yield name, self.uniforms(shape[1], shape[0])
                continue
            row = np.full(shape, NOTHING, dtype)
            value = np.asarray(self.value(name))
            row[(slice(len(value)),) if shape else ()] = value
            yield name, row

    def value(self, name: str) -> Any:
        """Returns the value of a control; a rule that the request did not choose has zeros."""
        return getattr(self, name) if hasattr(self, name) else self.rule.get(name, 0)


@cache
def _defaults() -> dict[str, Any]:
    return defaults_of(Controls)


@cache
def _needs() -> dict[str, Needs]:
    return annotations(Controls, Needs)


GREEDY = Controls()
UNIFORMS = "uniforms"
CONTROLS: tuple[Control, ...] = (
    *controls_in(Controls),
    Control("bool", core=False, name="penalised"),
    Control("float32", ("streams", "positions"), name=UNIFORMS),
)
CORE_CONTROLS = tuple(control for control in CONTROLS if control.core)

# What a grammar lets a step emit. They are no controls: engines for a GPU or of several ranks have
# no such inputs.
CONSTRAINED, ALLOWED = "constrained", "allowed"
WORD = 32  # tokens that one word of `allowed` is about
CONSTRAINTS: tuple[Control, ...] = (
    Control("bool", name=CONSTRAINED),  # whether `allowed` counts
    # Bit t % 32 of word t // 32 says whether row j may emit token t; bits beyond the vocabulary
    # mean nothing.
    Control("int32", ("window", "words"), name=ALLOWED),
)


def control_shapes(
    nextn: int, positions: int = 0, vocabulary: int = 0, table: Iterable[Control] = CONTROLS
) -> dict[str, tuple[int, ...]]:
    """Shape of a slot's place in each control of a table, in an engine for `nextn` drafts."""
    sizes = {
        "window": nextn + 1,
        "streams": BLOCK_DRAFT + max(nextn - 1, 0),
        "positions": positions,
        "words": -(-vocabulary // WORD),
    }
    return {c.name: tuple(sizes[n] if isinstance(n, str) else n for n in c.shape) for c in table}
