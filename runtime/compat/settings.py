"""Settings say in our words what a configuration asks for; several are merged here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from mtpbuild.runtime.compat.vocabulary import show
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import Ranks
from mtpbuild.runtime.sampling import SETTINGS

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import BuildInfo

DrafterName: TypeAlias = Literal["mtp-eagle", "mtp-vanilla"]
DRAFTERS = get_args(DrafterName)


@dataclass(frozen=True)
class Settings:
    """A configuration's wishes in our words; None: it says nothing of it."""

    nextn: int | None = None
    drafter: DrafterName | None = None
    use_relaxed_acceptance_for_thinking: bool | None = None
    relaxed_topk: int | None = None
    relaxed_delta: float | None = None
    begin_thinking_phase_token: int | None = None
    end_thinking_phase_token: int | None = None
    rejection_sample_method: Literal["standard", "synthetic", "block"] | None = None  # None: strict
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    tp: int | None = None
    ep: int | None = None
    moe_tp: int | None = None  # ranks that share an expert: tp / ep
    attention_dp: bool | None = None
    notes: tuple[str, ...] = ()  # a line for each key that was taken and does nothing


@dataclass(frozen=True)
class Source:
    """Settings, and the flag that they came by."""

    name: str
    settings: Settings


VALUES = tuple(field.name for field in fields(Settings) if field.default is None)
THINKING = ("begin_thinking_phase_token", "end_thinking_phase_token")
RELAXED = ("relaxed_topk", "relaxed_delta", *THINKING)


def merge(sources: Iterable[Source]) -> Settings:
    """Join all settings; raises UsageError that names both sources of a contradiction."""
    sources = tuple(sources)
    values: dict[str, Any] = {}
    for name in VALUES:
        values[name] = agreed(name, [(s.name, getattr(s.settings, name)) for s in sources])
    notes = [note for source in sources for note in source.settings.notes]
    if not values["use_relaxed_acceptance_for_thinking"]:
        needs = "no effect without use_relaxed_acceptance_for_thinking"
        notes += [f"{name}: {needs}" for name in RELAXED if values[name] is not None]
    return Settings(**values, notes=tuple(notes))


def agreed(name: str, given: Sequence[tuple[str, object]]) -> object:
    """The one value that all sources give; None if there is none."""
    said = [(source, value) for source, value in given if value is not None]
    for source, value in said[1:]:
        first, wanted = said[0]
        if value != wanted:
            raise UsageError(
                f"{name}: {first} says {show(wanted)}, {source} says {show(value)}; drop one"
            )
    return said[0][1] if said else None


def sampling_settings(settings: Settings) -> dict[str, Any]:
    """Says what the settings ask of a request, as keywords of SamplingParams.

    Relaxed values count only where relaxed acceptance is switched on, as in TensorRT-LLM.
    """
    idle = () if settings.use_relaxed_acceptance_for_thinking else RELAXED
    asked = [name for name in VALUES if name in SETTINGS and name not in idle]
    found = {name: getattr(settings, name) for name in asked}
    found["acceptance"] = None if settings.rejection_sample_method is None else "rejection"
    return {name: value for name, value in found.items() if value is not None}


def asked_ranks(settings: Settings) -> Ranks:
    """The ranks that the settings ask for; one if they say nothing of it."""
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
    """Refuse a configuration that says other than the engine has: nextn, drafter, ranks."""
    built = vars(build) | {"moe_tp": build.tp // build.ep}
    for name in ("tp", "ep", "moe_tp", "attention_dp"):
        wanted = getattr(settings, name)
        if wanted not in (None, built[name]):
            raise UsageError(
                f"the configuration asks for {name} {show(wanted)}, the engine was built with "
                f"{name} {show(built[name])}: leave it out, or build another engine"
            )
    if settings.nextn not in (None, build.nextn):
        raise UsageError(
            f"the configuration asks for nextn {settings.nextn}, the engine was built for nextn "
            f"{build.nextn}: leave it out, or build an engine with --nextn {settings.nextn}"
        )
    if build.drafter is not None and settings.drafter not in (None, build.drafter):
        raise UsageError(
            f"the configuration asks for drafter {settings.drafter}, the engine was built with "
            f"{build.drafter}: leave it out, or build an engine with --drafter {settings.drafter}"
        )
