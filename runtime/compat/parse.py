"""Reads vLLM's --speculative-config and TensorRT-LLM's YAML file into our settings."""

import difflib
import json
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtpbuild.runtime.checks import NEXTN_LIMIT, switch, whole_number
from mtpbuild.runtime.compat.settings import Settings, agreed
from mtpbuild.runtime.compat.tensorrt_llm import TRTLLM, TRTLLM_METHODS, TRTLLM_SPECULATIVE
from mtpbuild.runtime.compat.vllm import VLLM, VLLM_METHODS
from mtpbuild.runtime.compat.vocabulary import Vocabulary
from mtpbuild.runtime.errors import MissingDependencyError, RequestError, UsageError, install
from mtpbuild.runtime.ranks import MAX_RANKS
from mtpbuild.runtime.sampling import SETTINGS
from mtpbuild.runtime.synthetic import check_synthetic, synthetic_rates

VLLM_FLAG, YAML_FLAG = "--speculative-config", "--config"
SPELLINGS = {"False": "false", "True": "true", "None": "null", "'": "double quotes"}
CHECKS = {name: setting.check for name, setting in SETTINGS.items()} | {
    "nextn": whole_number(0, NEXTN_LIMIT),
    "use_relaxed_acceptance_for_thinking": switch,
    **dict.fromkeys(("tp", "ep", "moe_tp"), whole_number(1, MAX_RANKS)),
    "attention_dp": switch,
}


def parse_speculative_config(text: str) -> Settings:
    """Reads vLLM's JSON object; a UsageError names the key and what its value must be."""
    raw = _read_json(text, VLLM_FLAG)
    method, notes = raw.pop(VLLM_METHODS.key, None), tuple[str, ...]()
    if method is not None:
        notes = VLLM_METHODS.check(method, f"{VLLM_FLAG}: {VLLM_METHODS.key}")
    found = read_keys(raw, VLLM, VLLM_FLAG, others=TRTLLM_SPECULATIVE, notes=notes)
    rates, length = found.synthetic_acceptance_rates, found.synthetic_acceptance_length
    try:
        check_synthetic(found.rejection_sample_method, rates, length)
    except RequestError as error:
        raise UsageError(f"{VLLM_FLAG}: {error}") from None
    if found.nextn is not None:
        synthetic_rates(rates, length, found.nextn)
    return found


def parse_llm_yaml(path: Path) -> Settings:
    """Reads TensorRT-LLM's YAML file; a UsageError names the key and what its value must be."""
    where, methods = f"{YAML_FLAG} {path}", TRTLLM_METHODS
    raw = _read_yaml(path, where)
    inner = raw.pop(TRTLLM.apart, None)
    outer = read_keys(raw, TRTLLM, where, others=TRTLLM_SPECULATIVE)
    if inner is None:
        return outer
    where = f"{where}: {TRTLLM.apart}"
    inner = _object(inner, where)
    if inner.get(methods.key) is None:
        raise UsageError(f"{where}: {methods.key} is missing; supported: {methods.ours}")
    methods.check(inner.pop(methods.key), f"{where}: {methods.key}")
    return read_keys(inner, TRTLLM_SPECULATIVE, where, others=VLLM, notes=outer.notes)


def read_keys(
    raw: Mapping[str, object],
    known: Vocabulary,
    where: str,
    *,
    others: Vocabulary,
    notes: Iterable[str] = (),
) -> Settings:
    """Reads the keys of one object into settings, whose notes follow `notes`.

    others: the vocabulary from which a misplaced key may have come.
    """
    given: dict[str, list[tuple[str, object]]] = {}
    notes = [*notes]
    for key, value in raw.items():
        name = f"{where}: {key}"
        if key in known.ours:
            said = (name, read_value(known, key, value, name))
            given.setdefault(known.ours[key], []).append(said)
        elif key in known.later:
            known.later[key].check(name, value)
        elif key in known.no_effect:
            hint = known.no_effect[key]
            notes.append(f"{name}: no effect" + (f"; {hint}" if hint else ""))
        else:
            raise UsageError(f"{where}: unknown key {key!r}{_nearest(key, known, others)}")
    values: dict[str, Any] = {name: agreed(name, pairs) for name, pairs in given.items()}
    return Settings(**values, notes=tuple(notes))


def read_value(known: Vocabulary, key: str, value: object, label: str) -> Any:
    """Returns our setting for a key's value; None leaves it unset. Raises UsageError."""
    try:
        if value is None or (type(value) is int and value in known.idle.get(key, ())):
            return None
        if key in known.switches:  # false leaves the choice to us
            return known.switches[key] if switch(value) else None
        return CHECKS[known.ours[key]](value)
    except ValueError as error:
        raise UsageError(f"{label} {error}") from None


def _nearest(key: str, known: Vocabulary, others: Vocabulary) -> str:
    """Returns a hint for an unknown key: its place, our spelling of it, or the nearest key."""
    if known is TRTLLM and key in (others.apart, *others.ours, *others.later):
        return "; it belongs under speculative_config"
    setting = others.ours.get(key, key)  # also our own names
    same = [mine for mine, name in known.ours.items() if name == setting]
    wanted = [known.apart, *known.ours]
    near = same or difflib.get_close_matches(key, [*wanted, *known.later, *known.no_effect], 1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(wanted)}"


def _read_json(text: str, where: str) -> dict[str, Any]:
    """Reads a JSON object in which no key is given twice."""

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise UsageError(f"{where}: {key!r} is given twice")
        return dict(pairs)

    try:
        return _object(json.loads(text, object_pairs_hook=distinct), where)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON {_place(text, error.pos)}") from None
    except RecursionError:
        raise UsageError(f"{where}: not JSON, nested too deep") from None


def _read_yaml(path: Path, where: str) -> dict[str, Any]:
    """Reads a YAML file of one object of plain values, in which no key is given twice."""
    try:
        import yaml
    except ModuleNotFoundError:
        need = f"needs PyYAML: {install('yaml')}"
        raise MissingDependencyError(f"{where}: {need}") from None
    try:
        text = path.read_text(encoding="utf-8")
        _check_distinct(yaml.compose(text, Loader=yaml.SafeLoader), where)
        return _object(yaml.safe_load(text), where)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        # a file that can't be read; a value that doesn't fit its tag, such as `!!bool x`
        raise UsageError(f"{where}: can't be read ({error})") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", "nested too deep")
        raise UsageError(f"{where}: not YAML{place} ({problem})") from None


def _object(raw: object, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UsageError(f"{where}: must be an object of keys and values, not {reprlib.repr(raw)}")
    for key in raw:
        if not isinstance(key, str):
            raise UsageError(f"{where}: a key must be text, not {reprlib.repr(key)}")
    return dict(raw)


def _place(text: str, at: int) -> str:
    rest = text[at:]
    if not rest:
        return "at its end"
    said = next((spelling for spelling in SPELLINGS if rest.startswith(spelling)), None)
    hint = f": JSON writes {SPELLINGS[said]}, not {said}" if said else ""
    return f"at character {at + 1}, {rest[:20]!r}{hint}"


def _check_distinct(node: Any, where: str) -> None:
    """Refuses equal keys, of which YAML's loader takes the last, at the top and one level below."""
    seen = set[str]()
    for key, value in node.value if node is not None and node.id == "mapping" else ():
        name = key.value if key.id == "scalar" else ""
        if name and name in seen:
            line = key.start_mark.line + 1
            raise UsageError(f"{where}: {name!r} is given twice, again in line {line}")
        seen.add(name)
        if name == "speculative_config":
            _check_distinct(value, where)
