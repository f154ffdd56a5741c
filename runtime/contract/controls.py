"""Controls are what a request asks of a step: one table, which programs, slots and kernels read.

A new control is a field of `Controls`. The mixed program gets it as an input [B, *shape] of that
name, a manifest lists it, and every target writes it when a request begins.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

MAX_BANNED = 16  # tokens that a request may forbid before its min_tokens
MAX_LOGPROBS = 5  # alternatives that a row reports
MAX_BIASES = 300  # tokens that a request may bias, as many as OpenAI's API takes
HISTORY = "history"  # the state [B, positions] that penalties count tokens in
NOTHING = -1  # fills a list of ids or rates that is shorter than its place

# Streams of `uniforms`, each numbered by absolute position. Strict draws its target with DRAFT.
DRAFT, ACCEPT, RECOVER = 0, 1, 2
# A block's verdict depends on all its drafts, so the numbers of those it drops are not unseen and
# can't serve again: draft k > 1 has a stream of its own, numbered by the block's first position.
BLOCK_DRAFT = 3


@dataclass(frozen=True, slots=True)
class Control:
    """One input of the mixed program: [B, *shape], where a named size is the engine's."""

    name: str
    dtype: Literal["float32", "int64", "int32", "bool"]
    shape: tuple[int | str, ...]
    core: bool = True  # whether every mixed program has it; else those alone that have penalties


def _control(default: Any, dtype: str, *shape: int | str, core: bool = True) -> Any:
    return field(default=default, metadata={"dtype": dtype, "shape": shape, "core": core})


@dataclass(frozen=True, slots=True)
class Controls:
    """One request's wishes for acceptance and drafting (DESIGN 5); by default strict and greedy."""

    temperature: float = _control(0.0, "float32")  # 0: greedy
    top_k: int = _control(0, "int64")  # 0: off
    top_p: float = _control(1.0, "float32")
    min_p: float = _control(0.0, "float32")
    rejection: bool = _control(False, "bool")  # else strict
    block: bool = _control(False, "bool")  # rejection judges a step's drafts together
    # Chance of each draft if those before it are accepted; empty: acceptance is real.
    synthetic: tuple[float, ...] = _control((), "float32", "window")
    sampled_drafts: bool = _control(True, "bool")  # above temperature 0; else drafts are argmax
    # In the thinking phase of a greedy request; 1 is strict.
    relaxed_topk: int = _control(1, "int64")
    relaxed_delta: float = _control(0.0, "float32")
    thinking_ids: tuple[int, int] = _control((-1, -1), "int64", 2)  # begin and end the phase
    banned_ids: tuple[int, ...] = _control((), "int64", MAX_BANNED)  # not emitted at positions ..
    banned_until: int = _control(0, "int64")  # .. before this one
    # Penalties and bias, as in vLLM: plugins/penalties.py has the formulas.
    presence_penalty: float = _control(0.0, "float32", core=False)
    frequency_penalty: float = _control(0.0, "float32", core=False)
    repetition_penalty: float = _control(1.0, "float32", core=False)
    prompt_length: int = _control(0, "int64", core=False)  # what stands behind it is output
    bias_ids: tuple[int, ...] = _control((), "int64", MAX_BIASES, core=False)  # to whose logits
    bias_values: tuple[float, ...] = _control((), "float32", MAX_BIASES, core=False)  # is added
    # The host keeps these: they are no input of a program.
    thinking: bool = False  # whether the prompt ends inside the phase
    alternatives: bool = False  # whether top_ids and top_logprobs are wanted
    constrained: bool = False  # by a grammar, whose masks each step is given anew
    seed: int = 0
    history: tuple[int, ...] = ()  # the prompt, where a penalty counts its tokens

    @property
    def plain(self) -> bool:
        """Strict and greedy, nothing more: the decode program without sampling will do."""
        special = self.relaxed_topk > 1 or self.synthetic or self.banned_ids or self.alternatives
        special = special or self.penalised or self.constrained
        return self.temperature == 0 and not special

    @property
    def penalised(self) -> bool:
        """Whether the model's logits are edited: by a penalty or by a bias."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0, 0, 1) or bool(self.bias_ids)

    def uniforms(self, count: int, streams: int = BLOCK_DRAFT) -> NDArray[np.float32]:
        """[streams, count] in [0, 1): a function of seed, stream and position alone.

        So the numbers never depend on batch, step or nextn.
        """
        keys = (np.random.Philox(key=[self.seed, stream]) for stream in range(streams))
        return np.stack([np.random.Generator(key).random(count, np.float32) for key in keys])

    def rows(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield what each control of a slot becomes; `shapes` are a slot's, by name.

        A control without a shape is one that the programs lack. A plain request draws no numbers:
        its row of `uniforms` stays as it is.
        """
        for control in CONTROLS:
            if control.name not in shapes:
                continue
            shape = shapes[control.name]
            if control.name == UNIFORMS:
                if not self.plain:
                    yield control.name, self.uniforms(shape[1], shape[0])
                continue
            row = np.full(shape, NOTHING, control.dtype)
            value = np.asarray(getattr(self, control.name))
            row[(slice(len(value)),) if shape else ()] = value
            yield control.name, row


GREEDY = Controls()
UNIFORMS = "uniforms"
CONTROLS: tuple[Control, ...] = (
    *(Control(f.name, **f.metadata) for f in fields(Controls) if f.metadata),
    Control("penalised", "bool", (), core=False),
    Control(UNIFORMS, "float32", ("streams", "positions")),
)
CORE_CONTROLS = tuple(control for control in CONTROLS if control.core)

# What a grammar lets a step emit. They are no controls: engines for a GPU or of several ranks, and
# those that were built before, have no such inputs.
CONSTRAINED, ALLOWED = "constrained", "allowed"
WORD = 32  # tokens that one word of `allowed` is about
CONSTRAINTS: tuple[Control, ...] = (
    Control(CONSTRAINED, "bool", ()),  # whether `allowed` counts
    # Bit t % 32 of word t // 32 says whether row j may emit token t; bits beyond the vocabulary
    # mean nothing.
    Control(ALLOWED, "int32", ("window", "words")),
)


def constraint_shapes(nextn: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Shape of a slot's place in each input of `CONSTRAINTS`."""
    return {CONSTRAINED: (), ALLOWED: (nextn + 1, -(-vocabulary // WORD))}


def control_shapes(nextn: int, positions: int) -> dict[str, tuple[int, ...]]:
    """Shape of a slot's place in each control, in an engine for `nextn` drafts."""
    streams = BLOCK_DRAFT + max(nextn - 1, 0)
    sizes = {"window": nextn + 1, "streams": streams, "positions": positions}
    return {
        control.name: tuple(
            sizes[size] if isinstance(size, str) else size for size in control.shape
        )
        for control in CONTROLS
    }
