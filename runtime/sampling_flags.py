"""The flags that say how a request is sampled and accepted, the same on run, bench and eval."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from mtpbuild.runtime.compat.settings import Settings, sampling_settings
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import parse_list

if TYPE_CHECKING:
    from mtpbuild.runtime import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Our own flags; those of vLLM and TensorRT-LLM are in `compat/flags.py`."""

    temperature: Annotated[float, Option(help="0: greedy.")] = 0.0
    top_k: Annotated[int, Option(help="Sample among so many; 0: all.")] = 0
    top_p: Annotated[float, Option(help="Sample among so much probability.")] = 1.0
    min_p: Annotated[float, Option(help="Least share of the largest probability.")] = 0.0
    seed: Annotated[int | None, Option(help="Seed for sampling.")] = None
    acceptance: Annotated[
        str | None, Option(help="strict (default) or rejection, above temperature 0.")
    ] = None
    rejection_sample_method: Annotated[
        str | None, Option(help="standard (default), block, or synthetic: for timing only.")
    ] = None
    synthetic_acceptance_rates: Annotated[
        str | None, Option(help="Synthetic: share of steps that accept draft 1, 2..: 0.9,0.7")
    ] = None
    synthetic_acceptance_length: Annotated[
        float | None, Option(help="Synthetic: mean tokens per step.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class EndFlags:
    """Say when a request of `run` ends, and what it reports besides its tokens."""

    max_tokens: Annotated[int, Option(help="End after so many tokens.")] = 256
    stop: Annotated[list[str] | None, Option(help="End before this text; may be repeated.")] = None
    min_tokens: Annotated[int, Option(help="Don't end before so many tokens.")] = 0
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Go on behind the end of sequence.")
    ] = False
    logprobs: Annotated[
        int | None,
        Option(help="With --json: log-probabilities, and of the N most probable (to 5)."),
    ] = None


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
            flag = "--" + name.replace("_", "-")
            by = "rejection_sample_method" if name == "acceptance" else f"{name} {said}"
            raise UsageError(f"{flag} {wanted} contradicts the configuration's {by}")
    return SamplingParams(**asked)
