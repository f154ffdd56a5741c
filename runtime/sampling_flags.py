"""The flags that say how a request is sampled and accepted, the same on run, bench and eval."""

from dataclasses import dataclass
from json import loads
from typing import TYPE_CHECKING, Any

from mtpbuild.runtime.compat.settings import Settings, sampling_settings
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import flag, parse_list

if TYPE_CHECKING:
    from mtpbuild.runtime import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Our own flags; those of vLLM and TensorRT-LLM are in `compat/flags.py`."""

    temperature: float = flag(0.0, "0: greedy.")
    top_k: int = flag(0, "Sample among so many; 0: all.")
    top_p: float = flag(1.0, "Sample among so much probability.")
    min_p: float = flag(0.0, "Least share of the largest probability.")
    seed: int | None = flag(None, "Seed for sampling.")
    acceptance: str | None = flag(None, "strict (default) or rejection, above temperature 0.")
    rejection_sample_method: str | None = flag(
        None, "standard (default), block, or synthetic: for timing only."
    )
    synthetic_acceptance_rates: str | None = flag(
        None, "Synthetic: share of steps that accept draft 1, 2..: 0.9,0.7"
    )
    synthetic_acceptance_length: float | None = flag(None, "Synthetic: mean tokens per step.")


@dataclass(frozen=True, kw_only=True)
class EndFlags:
    """Say when a request of `run` ends, and what it reports besides its tokens."""

    max_tokens: int = flag(256, "End after so many tokens.")
    stop: list[str] | None = flag(None, "End before this text; may be repeated.")
    min_tokens: int = flag(0, "Don't end before so many tokens.")
    ignore_eos: bool = flag(False, "Go on behind the end of sequence.")
    logprobs: int | None = flag(
        None, "With --json: log-probabilities, and of the N most probable (to 5)."
    )


@dataclass(frozen=True, kw_only=True)
class PenaltyFlags:
    """Say what a request of `run` adds to the model's logits."""

    presence_penalty: float = flag(0.0, "Subtract it of tokens that the output has; -2..2.")
    frequency_penalty: float = flag(0.0, "Subtract it each time that the output has them; -2..2.")
    repetition_penalty: float = flag(
        1.0, "Above 1: tokens of prompt and output become less probable."
    )
    logit_bias: str | None = flag(None, """Add to logits of token ids: '{"5": -100, "7": 2.5}'.""")

    def asked(self) -> dict[str, Any]:
        """The same as fields of SamplingParams; raises UsageError if the bias is no JSON object."""
        if self.logit_bias is None:
            return vars(self)
        try:
            found = loads(self.logit_bias)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            example = """'{"5": -100}'"""
            raise UsageError(f"--logit-bias {self.logit_bias!r:.60} is no JSON object: {example}")
        return vars(self) | {"logit_bias": found}


def sampling_params(flags: SamplingFlags, settings: Settings, **others: Any) -> "SamplingParams":
    """Joins what flags, configuration and `others` ask of a request.

    Raises UsageError for a contradiction, RequestError for a value that can't be.
    """
    from mtpbuild.runtime import SamplingParams

    typed = {name: value for name, value in (vars(flags) | others).items() if value is not None}
    if (rates := flags.synthetic_acceptance_rates) is not None:
        found = parse_list("--synthetic-acceptance-rates", rates, float, "0.9,0.7,0.5")
        typed["synthetic_acceptance_rates"] = found
    if flags.rejection_sample_method is not None:
        typed.setdefault("acceptance", "rejection")
    asked = sampling_settings(settings)
    for name, wanted in typed.items():
        if (said := asked.setdefault(name, wanted)) != wanted:
            own = "--" + name.replace("_", "-")
            by = "rejection_sample_method" if name == "acceptance" else f"{name} {said}"
            raise UsageError(f"{own} {wanted} contradicts the configuration's {by}")
    return SamplingParams(**asked)
