"""The settings of flags and configuration files: joined, checked, and compared with an engine."""

import json
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from mtpbuild.runtime.checks import NEXTN_LIMIT, Check, switch, whole_number
from mtpbuild.runtime.errors import RequestError, UsageError
from mtpbuild.runtime.ranks import MAX_RANKS, Ranks
from mtpbuild.runtime.sampling import SETTINGS
from mtpbuild.runtime.synthetic import check_synthetic, synthetic_rates

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import BuildInfo

Said = tuple[str, str, Any]  # a setting, its source, and its value; None: not given
NOTES = "notes"  # the setting's name for lines to the user
CHECKS = {name: setting.check for name, setting in SETTINGS.items()} | {
    "nextn": whole_number(0, NEXTN_LIMIT),
    "use_relaxed_acceptance_for_thinking": switch,
    **dict.fromkeys(("tp", "ep", "moe_tp"), whole_number(1, MAX_RANKS)),
    "attention_dp": switch,
}
THINKING = ("begin_thinking_phase_token", "end_thinking_phase_token")
RELAXED = ("relaxed_topk", "relaxed_delta", *THINKING)


@dataclass(frozen=True)
class BuildSettings:
    """The settings of an engine, and the switch of relaxed acceptance; None: not given."""

    nextn: int | None = None
    drafter: str | None = None
    use_relaxed_acceptance_for_thinking: bool | None = None
    tp: int | None = None
    ep: int | None = None
    moe_tp: int | None = None  # ranks that share an expert: tp / ep
    attention_dp: bool | None = None
    notes: tuple[str, ...] = ()  # a line for each key that is accepted and has no effect

    def said(self, source: str) -> list[Said]:
        """Return these settings as (name, source, value)."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != NOTES}
        notes = [(NOTES, source, note) for note in self.notes]
        return [*((name, source, value) for name, value in given.items()), *notes]


# BuildSettings and all settings of a request. rejection_sample_method None: strict acceptance.
Settings: Any = make_dataclass(
    "Settings", [(name, Any, None) for name in SETTINGS], bases=(BuildSettings,), frozen=True
)


def join(said: Iterable[Said]) -> Settings:
    """Join settings; the UsageError for a contradiction names both sources."""
    given, notes = dict[str, tuple[str, Any]](), list[str]()
    for name, source, value in said:
        if name == NOTES:
            notes.append(value)
        elif value is not None:
            first, wanted = given.setdefault(name, (source, value))
            if value != wanted:
                raise UsageError(
                    f"{name}: {first} says {show(wanted)}, {source} says {show(value)}; drop one"
                )
    return Settings(**{name: value for name, (_, value) in given.items()}, notes=tuple(notes))


def relaxed_notes(settings: Settings) -> list[str]:
    """Return a line for each relaxed-acceptance value that has no effect without its switch."""
    on = settings.use_relaxed_acceptance_for_thinking
    given = [] if on else [name for name in RELAXED if getattr(settings, name) is not None]
    return [f"{name}: no effect without use_relaxed_acceptance_for_thinking" for name in given]


def check_rates(settings: Settings, where: str) -> None:
    """Raise UsageError unless the rates of synthetic acceptance fit the settings' method."""
    rates, length = settings.synthetic_acceptance_rates, settings.synthetic_acceptance_length
    try:
        check_synthetic(settings.rejection_sample_method, rates, length)
    except RequestError as error:
        raise UsageError(f"{where}: {error}") from None
    if settings.nextn is not None:
        synthetic_rates(rates, length, settings.nextn)


def sampling_settings(settings: Settings) -> dict[str, Any]:
    """Return the keywords of SamplingParams that the settings give.

    Values of relaxed acceptance count only if it is switched on, as in TensorRT-LLM.
    """
    idle = () if settings.use_relaxed_acceptance_for_thinking else RELAXED
    found = {name: getattr(settings, name) for name in SETTINGS if name not in idle}
    found["acceptance"] = None if settings.rejection_sample_method is None else "rejection"
    return {name: value for name, value in found.items() if value is not None}


def asked_ranks(settings: Settings) -> Ranks:
    """Return the ranks that the settings ask for, by default one."""
    tp = 1 if settings.tp is None else settings.tp
    ep = settings.ep
    if (share := settings.moe_tp) is not None:
        ep = tp // share if ep is None else ep
        if share * ep != tp:
            raise UsageError(
                f"moe_tensor_parallel_size {share} times --ep {ep} must be --tp, which is {tp}"
            )
    return Ranks(tp, 1 if ep is None else ep, bool(settings.attention_dp))


def check_engine(settings: Settings, build: "BuildInfo") -> None:
    """Raise UsageError if the engine's nextn, drafter or split differs from the settings."""
    built = vars(build) | {"moe_tp": build.tp // build.ep}
    for name in ("tp", "ep", "moe_tp", "attention_dp", "nextn", "drafter"):
        wanted, has = getattr(settings, name), built[name]
        if wanted in (None, has) or (name == "drafter" and has is None):
            continue
        own = f"an engine with --{name} {wanted}" if name in ("nextn", "drafter") else None
        raise UsageError(
            f"the configuration asks for {name} {show(wanted)}, the engine was built with "
            f"{name} {show(has)}: leave it out, or build {own or 'another engine'}"
        )


def checked(check: Check, value: object, label: str) -> Any:
    """Return a checked value; the UsageError for a wrong one begins with its label."""
    try:
        return check(value)
    except ValueError as error:
        raise UsageError(f"{label} {error}") from None


def as_object(raw: object, where: str) -> dict[str, Any]:
    """Return an object of keys and values; raise UsageError for anything else."""
    if not isinstance(raw, dict):
        raise UsageError(f"{where}: must be an object of keys and values, not {reprlib.repr(raw)}")
    for key in raw:
        if not isinstance(key, str):
            raise UsageError(f"{where}: a key must be text, not {reprlib.repr(key)}")
    return raw


def show(value: object) -> str:
    """Return a value as its user wrote it, cut to 60 characters."""
    return (value if isinstance(value, str) else json.dumps(value, default=repr))[:60]
