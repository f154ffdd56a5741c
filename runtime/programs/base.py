"""What the loop needs of a target: fill a slot's caches, start it, step all slots."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One decode step of all B slots; T = nextn + 1. The arrays are reused by the next step."""

    tokens: Ints  # [B, T] emitted tokens, -1 beyond num_tokens
    num_tokens: Ints  # [B] 1..T, 0 for an inactive slot
    window: Ints  # [B, T] the tokens that were judged: the newest, then the drafts
    num_drafts: Ints  # [B] how many of the window's drafts were real
    logprobs: Floats  # [B, T] log-probability of each emitted token
    margins: Floats  # [B, T] top-1 minus top-2 logit of each row


@dataclass(frozen=True, slots=True)
class Controls:
    """What a request asks of acceptance and drafting (DESIGN 5); by default strict and greedy."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    rejection: bool = False  # else strict
    sampled_drafts: bool = True  # above temperature 0; else drafts are argmax
    relaxed_topk: int = 1  # in the thinking phase of a greedy request; 1 is strict
    relaxed_delta: float = 0.0
    thinking_ids: tuple[int, int] = (-1, -1)  # tokens that begin and end the phase
    thinking: bool = False  # whether the prompt ends inside it
    seed: int = 0

    @property
    def plain(self) -> bool:
        """Strict and greedy: the decode program without sampling will do."""
        return self.temperature == 0 and self.relaxed_topk == 1

    def uniforms(self, count: int) -> Floats:
        """[3, count] in [0, 1): one stream per purpose, numbered by absolute position.

        A function of seed, purpose and position alone, never of batch, step or nextn.
        """
        streams = (np.random.Philox(key=[self.seed, purpose]) for purpose in range(3))
        return np.stack([np.random.Generator(s).random(count, np.float32) for s in streams])


GREEDY = Controls()


class Programs(Protocol):
    """An engine's programs and their state (DESIGN 3); `lookahead` is what prefill wants to see."""

    lookahead: int

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        """Fill the slot's caches for positions start .. start + T - 1.

        tokens [T + lookahead]: the chunk and the tokens behind it (0 where the prompt has ended).
        """

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        """Make the slot decode: `length` rows are committed, `newest` is the token behind them."""

    def step(self, active: Bools, rows: int) -> StepOutput:
        """Verify, accept, rewind and draft in the active slots [B].

        rows: at least lengths + T of every occupied slot, decoding or still being prefilled (the
        step writes T rows in each, and an inactive slot's go to the end of the rows in use).
        """
        ...
