"""The flags that say how a request is sampled and accepted, the same on run, bench and eval."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.field_config import Settings, sampling_settings

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


def sampling_params(flags: SamplingFlags, settings: Settings, **others: Any) -> "SamplingParams":
    """What flags and configuration ask of a request, and `others` of SamplingParams.

    Raises UsageError for a contradiction, RequestError for a value that can't be.
    """
    from mtpbuild.runtime import SamplingParams

    asked = sampling_settings(settings)
    wanted = flags.acceptance
    if wanted is not None and asked.setdefault("acceptance", wanted) != wanted:
        raise UsageError(
            f"--acceptance {wanted} contradicts the configuration's rejection_sample_method"
        )
    return SamplingParams(
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        min_p=flags.min_p,
        seed=flags.seed,
        **asked,
        **others,
    )
