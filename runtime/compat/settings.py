"""vLLM's --speculative-config and TensorRT-LLM's YAML file, read into settings of ours."""

import dataclasses
import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mtpbuild.runtime.compat.keys import (
    TRTLLM,
    TRTLLM_METHODS,
    TRTLLM_SPECULATIVE,
    VLLM,
    VLLM_METHODS,
    Methods,
    Vocabulary,
    show,
)
from mtpbuild.runtime.compat.text import as_object, read_json, read_yaml
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.synthetic import synthetic_rates

if TYPE_CHECKING:
    from mtpbuild.runtime.manifest import BuildInfo

VLLM_FLAG, YAML_FLAG = "--speculative-config", "--config"
DrafterName: TypeAlias = Literal["mtp-eagle", "mtp-vanilla"]


@dataclass(frozen=True)
class Settings:
    """What a configuration asks for, in our words; None: it says nothing of it."""

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
    notes: tuple[str, ...] = ()  # a line for each key that was taken and does nothing
    unsupported: tuple[str, ...] = ()  # a line for each key that asks for what is not there yet


@dataclass(frozen=True)
class Source:
    """Settings, and the flag that they came by."""

    name: str
    settings: Settings


REJECTION = (
    "rejection_sample_method",
    "draft_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
)
RELAXED = (
    "relaxed_topk",
    "relaxed_delta",
    "begin_thinking_phase_token",
    "end_thinking_phase_token",
)
VALUES = tuple(
    field.name
    for field in dataclasses.fields(Settings)
    if field.name not in ("notes", "unsupported")
)


def parse_speculative_config(text: str) -> Settings:
    """vLLM's JSON object; raises UsageError with the key and what it must be."""
    raw = read_json(text, VLLM_FLAG)
    notes = []
    if (method := raw.pop(VLLM_METHODS.key, None)) is not None:
        notes = check_method(VLLM_METHODS, method, f"{VLLM_FLAG}: {VLLM_METHODS.key}")
    settings = _read(raw, VLLM, VLLM_FLAG, others=TRTLLM_SPECULATIVE)
    _check_synthetic(settings)
    return dataclasses.replace(settings, notes=(*notes, *settings.notes))


def parse_llm_yaml(path: Path) -> Settings:
    """TensorRT-LLM's YAML file; raises UsageError with the key and what it must be."""
    where = f"{YAML_FLAG} {path}"
    raw = read_yaml(path, where)
    inner = raw.pop("speculative_config", None)
    settings = _read(raw, TRTLLM, where, others=TRTLLM_SPECULATIVE)
    if inner is None:
        return settings
    where = f"{where}: speculative_config"
    inner = as_object(inner, where)
    key = TRTLLM_METHODS.key
    if inner.get(key) is None:
        raise UsageError(f"{where}: {key} is missing; supported: {TRTLLM_METHODS.ours}")
    check_method(TRTLLM_METHODS, inner.pop(key), f"{where}: {key}")
    return _join(settings, _read(inner, TRTLLM_SPECULATIVE, where, others=VLLM))


def check_method(methods: Methods, name: object, where: str) -> list[str]:
    """The deprecation line of an older name; raises UsageError for a method that isn't ours."""
    spelled = {_spelling(known): known for known in (methods.ours, *methods.others)}
    given = _spelling(str(name))
    if given in map(_spelling, methods.aliases):
        return [f"{where} {name!r} is deprecated: write {methods.ours!r}"]
    if given not in spelled:
        known = ", ".join((methods.ours, *methods.others))
        raise UsageError(f"{where}: unknown method {reprlib.repr(name)}, known: {known}")
    if spelled[given] != methods.ours:
        raise UsageError(
            f"{where}: {name!r} is not supported by mtpbuild; supported: {methods.ours}"
        )
    return []


def merge(sources: Iterable[Source]) -> Settings:
    """All settings together; raises UsageError that names both sources of a contradiction."""
    sources = tuple(sources)
    values: dict[str, Any] = {}
    for name in VALUES:
        values[name] = agreed(name, [(s.name, getattr(s.settings, name)) for s in sources])
    notes = [note for source in sources for note in source.settings.notes]
    if not values["use_relaxed_acceptance_for_thinking"]:
        needs = "no effect without use_relaxed_acceptance_for_thinking"
        notes += [f"{name}: {needs}" for name in RELAXED if values[name] is not None]
    unsupported = tuple(line for source in sources for line in source.settings.unsupported)
    return Settings(**values, notes=tuple(notes), unsupported=unsupported)


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


def require_supported(settings: Settings) -> None:
    """Refuse what this version can't do, so that nothing is ignored in silence."""
    if settings.unsupported:
        raise UsageError(settings.unsupported[0])


def sampling_settings(settings: Settings) -> dict[str, Any]:
    """What the settings say of a request, as keywords of SamplingParams.

    Relaxed values count only where relaxed acceptance is switched on, as in TensorRT-LLM.
    """
    found: dict[str, Any] = {}
    if settings.use_relaxed_acceptance_for_thinking:
        found |= {name: getattr(settings, name) for name in RELAXED}
    if settings.rejection_sample_method is not None:
        found["acceptance"] = "rejection"
    found |= {name: getattr(settings, name) for name in REJECTION}
    return {name: value for name, value in found.items() if value is not None}


def check_engine(settings: Settings, build: "BuildInfo") -> None:
    """An engine's nextn and drafter are fixed: a configuration may only repeat them."""
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


def _check_synthetic(settings: Settings) -> None:
    found, length = settings.synthetic_acceptance_rates, settings.synthetic_acceptance_length
    synthetic = settings.rejection_sample_method == "synthetic"
    if not synthetic and (found is not None or length is not None):
        name = "length" if found is None else "rates"
        needs = "needs rejection_sample_method 'synthetic'"
        raise UsageError(f"{VLLM_FLAG}: synthetic_acceptance_{name} {needs}")
    if synthetic and (found is None) == (length is None):
        raise UsageError(
            f"{VLLM_FLAG}: rejection_sample_method 'synthetic' needs exactly one of "
            "synthetic_acceptance_rates and synthetic_acceptance_length"
        )
    if synthetic and settings.nextn is not None:
        synthetic_rates(found, length, settings.nextn)


def _read(
    raw: Mapping[str, object], known: Vocabulary, where: str, *, others: Vocabulary
) -> Settings:
    """Sort the keys of one object; `others` are where a stray key may have come from."""
    given: dict[str, list[tuple[str, object]]] = {}
    notes, unsupported = [], []
    for key, value in raw.items():
        if key in known.ours:
            name, found = _value(key, value, known, where)
            given.setdefault(name, []).append((f"{where}: {key}", found))
        elif key in known.later:
            unsupported += known.later[key].refusal(f"{where}: {key}", value)
        elif key in known.no_effect:
            hint = known.no_effect[key]
            notes.append(f"{where}: {key}: no effect" + (f"; {hint}" if hint else ""))
        else:
            raise UsageError(f"{where}: unknown key {key!r}{_nearest(key, known, others)}")
    values: dict[str, Any] = {name: agreed(name, pairs) for name, pairs in given.items()}
    return Settings(**values, notes=tuple(notes), unsupported=tuple(unsupported))


def _value(key: str, value: object, known: Vocabulary, where: str) -> tuple[str, object]:
    name, read = known.ours[key]
    try:
        return name, None if value is None else read(value)
    except ValueError as error:
        raise UsageError(f"{where}: {key} {error}") from None


def _nearest(key: str, known: Vocabulary, others: Vocabulary) -> str:
    """A hint for an unknown key: where it belongs, our spelling of it, or the nearest one."""
    if known is TRTLLM and key in (TRTLLM_METHODS.key, *others.ours, *others.later):
        return "; it belongs under speculative_config"
    field = others.ours[key][0] if key in others.ours else key  # also our own names
    same = [mine for mine, (name, _) in known.ours.items() if name == field]
    wanted = [*known.ours] or ["speculative_config"]
    near = same or difflib.get_close_matches(key, [*wanted, *known.later, *known.no_effect], 1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(wanted)}"


def _join(outer: Settings, inner: Settings) -> Settings:
    """Inner's values, the notes of both."""
    return dataclasses.replace(
        inner,
        notes=(*outer.notes, *inner.notes),
        unsupported=(*outer.unsupported, *inner.unsupported),
    )


def _spelling(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
