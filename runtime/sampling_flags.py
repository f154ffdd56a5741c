"""The flags that say how a request is sampled and accepted, the same on run, bench and eval."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtpbuild.runtime.compat.settings import Settings, sampling_settings
from mtpbuild.runtime.errors import UsageError

if TYPE_CHECKING:
    from mtpbuild.runtime import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Ours; those of vLLM and TensorRT-LLM are in `field_flags`."""

    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Sample among so many; 0: all.")] = 0
    top_p: Annotated[float, typer.Option(help="Sample among so much probability.")] = 1.0
    min_p: Annotated[float, typer.Option(help="Least share of the largest probability.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Seed for sampling.")] = None
    acceptance: Annotated[
        str | None, typer.Option(help="strict (default) or rejection, above temperature 0.")
    ] = None
    rejection_sample_method: Annotated[
        str | None, typer.Option(help="standard (default), block, or synthetic: for timing only.")
    ] = None
    synthetic_acceptance_rates: Annotated[
        str | None, typer.Option(help="Synthetic: share of steps that accept draft 1, 2..: 0.9,0.7")
    ] = None
    synthetic_acceptance_length: Annotated[
        float | None, typer.Option(help="Synthetic: mean tokens per step.")
    ] = None

    def acceptance_asked(self) -> dict[str, Any]:
        """Keywords of SamplingParams that a configuration may say too."""
        method, rates = self.rejection_sample_method, self.synthetic_acceptance_rates
        asked = {
            "acceptance": self.acceptance or (method and "rejection"),
            "rejection_sample_method": method,
            "synthetic_acceptance_rates": None if rates is None else _rates(rates),
            "synthetic_acceptance_length": self.synthetic_acceptance_length,
        }
        return {name: value for name, value in asked.items() if value is not None}


def sampling_params(flags: SamplingFlags, settings: Settings, **others: Any) -> "SamplingParams":
    """What flags and configuration ask of a request, and `others` of SamplingParams.

    Raises UsageError for a contradiction, RequestError for a value that can't be.
    """
    from mtpbuild.runtime import SamplingParams

    asked = sampling_settings(settings)
    for name, wanted in flags.acceptance_asked().items():
        if (said := asked.setdefault(name, wanted)) != wanted:
            flag = "--" + name.replace("_", "-")
            by = "rejection_sample_method" if name == "acceptance" else f"{name} {said}"
            raise UsageError(f"{flag} {wanted} contradicts the configuration's {by}")
    return SamplingParams(
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        min_p=flags.min_p,
        seed=flags.seed,
        **asked,
        **others,
    )


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--synthetic-acceptance-rates {text!r} is not a list of numbers such as 0.9,0.7,0.5"
        ) from None
