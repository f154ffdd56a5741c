"""The settings of flags and configuration files: joined, checked, and compared with an engine.

Settings are a mapping from names to values; a setting that was not given is missing. A missing
rejection_sample_method means strict acceptance.
"""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from mtpbuild.runtime.checks import NEXTN_LIMIT, Check, check_bool, check_integer
from mtpbuild.runtime.errors import RequestError, UsageError
from mtpbuild.runtime.ranks import MAX_RANKS, Ranks
from mtpbuild.runtime.sampling.params import SETTINGS
from mtpbuild.runtime.sampling.synthetic import check_synthetic, choose_synthetic_rates

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import BuildInfo

Configuration: TypeAlias = Mapping[str, Any]
Given = tuple[str, str, Any]  # a setting, its source, and its value; None: not given
NOTES = "notes"  # name of the setting with lines to the user, a tuple
SWITCH = "use_relaxed_acceptance_for_thinking"
RELAXED = (
    *("relaxed_topk", "relaxed_delta"),
    *("begin_thinking_phase_token", "end_thinking_phase_token"),
)
CHECKS = {name: setting.check for name, setting in SETTINGS.items()} | {
    "nextn": check_integer(0, NEXTN_LIMIT),
    SWITCH: check_bool,
    **dict.fromkeys(("tp", "ep", "moe_tp"), check_integer(1, MAX_RANKS)),
    "attention_dp": check_bool,
}


def name_source(settings: Configuration, source: str) -> list[Given]:
    """Return settings together with the source that gives them."""
    return [(name, source, value) for name, value in settings.items()]


def join(every: Iterable[Given]) -> dict[str, Any]:
    """Join settings; the UsageError for a contradiction names both sources."""
    joined, sources, notes = dict[str, Any](), dict[str, str](), ()
    for name, source, value in every:
        if name == NOTES:
            notes += value
        elif value is not None:
            if value != (first := joined.setdefault(name, value)):
                said = f"{sources[name]} says {shorten(first)}, {source} says {shorten(value)}"
                raise UsageError(f"{name}: {said}; drop one")
            sources.setdefault(name, source)
    return joined | ({NOTES: notes} if notes else {})


def list_relaxed_notes(settings: Configuration) -> list[str]:
    """Return a line for each relaxed-acceptance value that has no effect without its switch."""
    on = settings.get(SWITCH)
    given = [] if on else [name for name in RELAXED if name in settings]
    return [f"{name}: no effect without {SWITCH}" for name in given]


def check_synthetic_settings(settings: Configuration, where: str) -> None:
    """Raise UsageError unless the rates of synthetic acceptance fit the settings' method."""
    rates, length = (settings.get(f"synthetic_acceptance_{name}") for name in ("rates", "length"))
    try:
        check_synthetic(settings.get("rejection_sample_method"), rates, length)
    except RequestError as error:
        raise UsageError(f"{where}: {error}") from None
    if "nextn" in settings:
        choose_synthetic_rates(rates, length, settings["nextn"])


def read_sampling_settings(settings: Configuration) -> dict[str, Any]:
    """Return the keywords of SamplingParams that the settings give.

    Values of relaxed acceptance count only if it is switched on, as in TensorRT-LLM.
    """
    idle = () if settings.get(SWITCH) else RELAXED
    values = {n: value for n, value in settings.items() if n in SETTINGS and n not in idle}
    return values | ({"acceptance": "rejection"} if "rejection_sample_method" in values else {})


def read_requested_ranks(settings: Configuration) -> Ranks:
    """Return the ranks that the settings ask for, by default one.

    moe_tp is the number of ranks that share an expert, tp / ep.
    """
    tp, share = settings.get("tp", 1), settings.get("moe_tp")
    ep = settings.get("ep", 1 if share is None else tp // share)
    if share is not None and share * ep != tp:
        raise UsageError(
            f"moe_tensor_parallel_size {share} times --ep {ep} must be --tp, which is {tp}"
        )
    return Ranks(tp, ep, settings.get("attention_dp", False))


def check_engine(settings: Configuration, build: "BuildInfo") -> None:
    """Raise UsageError if the engine's nextn, drafter or split differs from the settings."""
    built = vars(build) | {"moe_tp": build.tp // build.ep}
    for name in ("tp", "ep", "moe_tp", "attention_dp", "nextn", "drafter"):
        wanted, has = settings.get(name), built[name]
        if wanted in (None, has) or (name == "drafter" and has is None):
            continue
        other = f"an engine with --{name} {wanted}" if name in ("nextn", "drafter") else None
        raise UsageError(
            f"the configuration asks for {name} {shorten(wanted)}, the engine was built with "
            f"{name} {shorten(has)}: leave it out, or build {other or 'another engine'}"
        )


def checked(check: Check, value: object, label: str) -> Any:
    """Return a checked value; the UsageError for a wrong value begins with the label."""
    try:
        return check(value)
    except ValueError as error:
        raise UsageError(f"{label} {error}") from None


def shorten(value: object) -> str:
    """Return a value as its user wrote it, cut to 60 characters."""
    return (value if isinstance(value, str) else json.dumps(value, default=repr))[:60]
