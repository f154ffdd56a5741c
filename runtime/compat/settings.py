"""Holds a configuration in our words, and merges several of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from mtpbuild.runtime.compat.tensorrt_llm import TRTLLM_SPECULATIVE
from mtpbuild.runtime.compat.vllm import VLLM
from mtpbuild.runtime.compat.vocabulary import show
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import Ranks
from mtpbuild.runtime.sampling import SETTINGS

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import BuildInfo

# The fields of SamplingParams that a configuration can give.
_KEYS = {*VLLM.ours.values(), *TRTLLM_SPECULATIVE.ours.values()}
ASKED = [name for name in SETTINGS if name in _KEYS]


@dataclass(frozen=True)
class BuildSettings:
    """Holds an engine's settings, and relaxed acceptance's switch; None: not given."""

    nextn: int | None = None
    drafter: str | None = None
    use_relaxed_acceptance_for_thinking: bool | None = None
    tp: int | None = None
    ep: int | None = None
    moe_tp: int | None = None  # ranks that share an expert: tp / ep
    attention_dp: bool | None = None
    notes: tuple[str, ...] = ()  # a line for each key that is accepted and does nothing


# A configuration in our words. A rejection_sample_method of None means strict acceptance.
Settings: Any = make_dataclass(
    "Settings", [(name, Any, None) for name in ASKED], bases=(BuildSettings,), frozen=True
)


@dataclass(frozen=True)
class Source:
    """Holds settings, and the flag that gave them."""

    name: str
    settings: Settings


VALUES = tuple(field.name for field in fields(Settings) if field.default is None)
THINKING = ("begin_thinking_phase_token", "end_thinking_phase_token")
RELAXED = ("relaxed_topk", "relaxed_delta", *THINKING)


def merge(sources: Iterable[Source]) -> Settings:
    """Joins all settings; the UsageError for a contradiction names both sources."""
    sources = tuple(sources)
    values = {n: agreed(n, [(s.name, getattr(s.settings, n)) for s in sources]) for n in VALUES}
    notes = [note for source in sources for note in source.settings.notes]
    if not values["use_relaxed_acceptance_for_thinking"]:
        needs = "no effect without use_relaxed_acceptance_for_thinking"
        notes += [f"{name}: {needs}" for name in RELAXED if values[name] is not None]
    return Settings(**values, notes=tuple(notes))


def agreed(name: str, given: Sequence[tuple[str, object]]) -> object:
    """Returns the value on which all sources agree, or None if none gives one."""
    said = [(source, value) for source, value in given if value is not None]
    for source, value in said[1:]:
        first, wanted = said[0]
        if value != wanted:
            raise UsageError(
                f"{name}: {first} says {show(wanted)}, {source} says {show(value)}; drop one"
            )
    return said[0][1] if said else None


def sampling_settings(settings: Settings) -> dict[str, Any]:
    """Returns the keywords of SamplingParams that the settings give.

    Relaxed values count only if relaxed acceptance is switched on, as in TensorRT-LLM.
    """
    idle = () if settings.use_relaxed_acceptance_for_thinking else RELAXED
    found = {name: getattr(settings, name) for name in ASKED if name not in idle}
    found["acceptance"] = None if settings.rejection_sample_method is None else "rejection"
    return {name: value for name, value in found.items() if value is not None}


def asked_ranks(settings: Settings) -> Ranks:
    """Returns the ranks that the settings ask for, by default one."""
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
    """Raises UsageError if the engine has another nextn, drafter or split than the settings."""
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
