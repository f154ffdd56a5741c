"""The controls of a request's steps: the per-slot inputs that programs, slots and kernels read.

To add a control, add a field to `StepControls`. It becomes an input [B, *shape] of that name in the
mixed program, and every target writes it when a request begins. If `SamplingParams` has a setting
of the same name, that is the field's value.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.settings import MAX_BIASES, control, list_settings_controls
from mtpbuild.runtime.contract.settings import MAX_LOGPROBS as MAX_LOGPROBS
from mtpbuild.runtime.contract.settings import Control as Control

MAX_BANNED = 16  # tokens that a request may forbid before its min_tokens
HISTORY = "history"  # the state [B, positions] in which penalties count tokens
PADDING = -1  # pads a list of ids or rates to the length of its input

# Streams of `uniforms`, each indexed by absolute position. Strict acceptance samples with DRAFT.
DRAFT, ACCEPT, RECOVER = 0, 1, 2
# Block verification looks at all drafts of a step, so the numbers of a rejected draft have
# influenced the result and must not be used again. Draft k > 1 therefore has its own stream,
# indexed by the position of the block's first draft.
BLOCK_DRAFT = 3

SAMPLED = ("temperature",)  # values of `needs`
RELAXED = ("relaxed_topk",)
PENALISED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "bias_ids")
BY_METHOD = "rejection_sample_method"
BIAS: dict[str, Any] = {"core": False, "setting": "logit_bias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepControls:
    """The controls of one request's steps; by default acceptance is strict and greedy."""

    temperature: float = control(0.0, "float32")
    top_k: int = control(0, "int64", needs=SAMPLED)
    top_p: float = control(1.0, "float32", needs=SAMPLED)
    min_p: float = control(0.0, "float32", needs=SAMPLED)
    # Applies in the thinking phase of greedy requests; 1 means strict acceptance.
    relaxed_topk: int = control(1, "int64")
    relaxed_delta: float = control(0.0, "float32", needs=RELAXED)
    # As in vLLM; plugins/penalties.py has the formulas.
    presence_penalty: float = control(0.0, "float32", core=False)
    frequency_penalty: float = control(0.0, "float32", core=False)
    repetition_penalty: float = control(1.0, "float32", core=False)
    # Accept drafts by rejection sampling. False: strictly.
    rejection: bool = control(False, "bool", setting="acceptance", needs=SAMPLED)
    # Verify a step's drafts together, not one by one.
    block: bool = control(False, "bool", setting=BY_METHOD, needs=SAMPLED)
    # Probability of accepting each draft by chance, given that the drafts before it were accepted.
    # Empty: drafts are really verified.
    synthetic: tuple[float, ...] = control((), "float32", ("window",), setting=BY_METHOD)
    # Sample drafts above temperature 0. False: drafts are the argmax.
    sampled_drafts: bool = control(True, "bool", setting="draft_sample_method", needs=SAMPLED)
    # The tokens that begin and end the thinking phase.
    thinking_ids: tuple[int, int] = control(
        (-1, -1), "int64", (2,), setting="relaxed_topk", needs=RELAXED
    )
    # Tokens that are not emitted at positions before `banned_until`.
    banned_ids: tuple[int, ...] = control((), "int64", (MAX_BANNED,), setting="min_tokens")
    banned_until: int = control(0, "int64", setting="min_tokens", needs=("banned_ids",))
    bias_ids: tuple[int, ...] = control((), "int64", (MAX_BIASES,), **BIAS)
    bias_values: tuple[float, ...] = control(
        (), "float32", (MAX_BIASES,), **BIAS, needs=("bias_ids",)
    )
    # Penalties count tokens from this position on as output.
    prompt_length: int = control(0, "int64", core=False, needs=PENALISED)
    # The request's values for the controls of another package's rule, by name; {} for a built-in
    # rule.
    rule: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # The fields below stay on the host; no program has them as inputs.
    thinking: bool = False  # whether the prompt ends inside the thinking phase
    alternatives: bool = False  # whether to report top_ids and top_logprobs
    constrained: bool = False  # whether a grammar's token masks are set before each step
    seed: int = 0
    history: tuple[int, ...] = ()  # the prompt, if the repetition penalty counts its tokens

    def counts(self, name: str) -> bool:
        """Tell whether a control has an effect.

        It has none at its default, or while all controls that it needs have theirs.
        """
        if getattr(self, name) == getattr(GREEDY, name):
            return False
        needs = FIELDS[name].needs
        return not needs or any(map(self.counts, needs))

    @property
    def plain(self) -> bool:
        """Whether no field has an effect, so that the decode program without sampling suffices."""
        needs_mixed = self.rule or self.alternatives or self.constrained
        return not needs_mixed and not any(map(self.counts, FIELDS))

    @property
    def penalised(self) -> bool:
        """Whether a penalty or a bias changes the model's logits."""
        return any(map(self.counts, PENALISED))

    def uniforms(self, count: int, streams: int = BLOCK_DRAFT) -> NDArray[np.float32]:
        """Return uniform numbers [streams, count] in [0, 1).

        They depend on seed, stream and position alone, never on batch, step or nextn.
        """
        # A list of Python ints would turn seeds from 2**63 on into floats.
        keys = [np.array([self.seed % 2**64, stream], np.uint64) for stream in range(streams)]
        numbers = (np.random.Generator(np.random.Philox(key=key)) for key in keys)
        return np.stack([stream.random(count, np.float32) for stream in numbers])

    def rows(
        self, places: Mapping[str, tuple[tuple[int, ...], Any]]
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the row of each control for a slot.

        places: shape and dtype of one slot's row, for each control that the programs have. A plain
        request draws no random numbers, so no row of `uniforms` is yielded for it.
        """
        for name, (shape, dtype) in places.items():
            if name == UNIFORMS:
                if not self.plain:
                    yield name, self.uniforms(shape[1], shape[0])
                continue
            row = np.full(shape, PADDING, dtype)
            value = np.asarray(self.value(name))
            row[(slice(len(value)),) if shape else ()] = value
            yield name, row

    def value(self, name: str) -> Any:
        """Return the value of a control; 0 for a setting of a rule that was not chosen."""
        return getattr(self, name) if hasattr(self, name) else self.rule.get(name, 0)


FIELDS = {control.name: control for control in list_settings_controls(StepControls)}
GREEDY = StepControls()
UNIFORMS = "uniforms"
CONTROLS: tuple[Control, ...] = (
    *FIELDS.values(),
    Control("bool", core=False, name="penalised"),
    Control("float32", ("streams", "positions"), name=UNIFORMS),
)
CORE_CONTROLS = tuple(control for control in CONTROLS if control.core)

# The inputs by which a grammar limits a step. They are not part of `CONTROLS`, because engines for
# GPUs or of several ranks have no such inputs.
CONSTRAINED, ALLOWED = "constrained", "allowed"
WORD = 32  # tokens per word of `allowed`
CONSTRAINTS: tuple[Control, ...] = (
    Control("bool", name=CONSTRAINED),  # whether `allowed` applies
    # Bit t % 32 of word t // 32 says whether row j may emit token t. Bits beyond the vocabulary are
    # ignored.
    Control("int32", ("window", "words"), name=ALLOWED),
)


def list_control_shapes(
    nextn: int, positions: int = 0, vocabulary: int = 0, table: Iterable[Control] = CONTROLS
) -> dict[str, tuple[int, ...]]:
    """Return the shape of one slot's row for each control, in an engine for `nextn` drafts."""
    sizes = {
        "window": nextn + 1,
        "streams": BLOCK_DRAFT + max(nextn - 1, 0),
        "positions": positions,
        "words": -(-vocabulary // WORD),
    }
    return {c.name: tuple(sizes[n] if isinstance(n, str) else n for n in c.shape) for c in table}
