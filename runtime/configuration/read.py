"""Configurations of vLLM and TensorRT-LLM, read into mtpbuild's settings."""

import difflib
import json
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtpbuild.runtime.checks import check_bool
from mtpbuild.runtime.configuration import tables
from mtpbuild.runtime.configuration.settings import (
    CHECKS,
    NOTES,
    Given,
    check_synthetic_settings,
    checked,
    join,
    shorten,
)
from mtpbuild.runtime.errors import UsageError, explain_missing_package

VLLM_FLAG, YAML_FLAG = "--speculative-config", "--config"
COUNTS = ("num_speculative_tokens", "num-speculative-tokens")  # vLLM's, not TensorRT-LLM's
SPELLINGS = {"False": "false", "True": "true", "None": "null", "'": "double quotes"}


def parse_speculative_config(text: str) -> dict[str, Any]:
    """Read vLLM's JSON object; a UsageError names a wrong key and what its value must be."""
    settings = join(read_keys(_read_json(text, VLLM_FLAG), tables.VLLM, VLLM_FLAG))
    check_synthetic_settings(settings, VLLM_FLAG)
    return settings


def parse_llm_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of TensorRT-LLM, or of vLLM, whose keys have dashes.

    A UsageError names a wrong key and what its value must be.
    """
    where = f"{YAML_FLAG} {path}"
    settings = join(read_keys(_read_yaml(path, where), tables.TRTLLM, where))
    check_synthetic_settings(settings, where)
    return settings


def _read_json(text: str, where: str) -> object:
    """Read JSON; raise UsageError for a key that an object has twice."""

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise UsageError(f"{where}: {key!r} is given twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=distinct)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON {_describe_place(text, error.pos)}") from None
    except RecursionError:
        raise UsageError(f"{where}: not JSON, nested too deep") from None


def _read_yaml(path: Path, where: str) -> object:
    """Read a YAML file of plain values; refuse duplicate keys in its two upper levels."""
    with explain_missing_package(f"{where}", "yaml"):
        import yaml
    try:
        text = path.read_text(encoding="utf-8")
        _check_distinct(yaml.compose(text, Loader=yaml.SafeLoader), where)
        return yaml.safe_load(text)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        # an unreadable file, or a value that does not fit its tag, such as `!!bool x`
        raise UsageError(f"{where}: can't be read ({error})") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", "nested too deep")
        raise UsageError(f"{where}: not YAML{place} ({problem})") from None


def _describe_place(text: str, at: int) -> str:
    rest = text[at:]
    if not rest:
        return "at its end"
    spelling = next((spelling for spelling in SPELLINGS if rest.startswith(spelling)), None)
    hint = f": JSON writes {SPELLINGS[spelling]}, not {spelling}" if spelling else ""
    return f"at character {at + 1}, {rest[:20]!r}{hint}"


def _check_distinct(node: Any, where: str) -> None:
    """Raise UsageError for duplicate keys, which YAML's loader accepts, in the upper two levels."""
    names = set[str]()
    for key, value in node.value if node is not None and node.id == "mapping" else ():
        name = key.value if key.id == "scalar" else ""
        if name and name in names:
            line = key.start_mark.line + 1
            raise UsageError(f"{where}: {name!r} is given twice, again in line {line}")
        names.add(name)
        if name == "speculative_config":
            _check_distinct(value, where)


def read_keys(raw: object, table: tables.Table, where: str) -> Iterator[Given]:
    """Yield the settings and notes of an object's keys, including those of nested objects.

    Raises UsageError for a key that is unknown or unsupported, and for a wrong value.
    """
    if not isinstance(raw, dict):
        raise UsageError(f"{where}: must be an object of keys and values, not {reprlib.repr(raw)}")
    given: dict[Any, Any] = raw
    if table is tables.SPECULATIVE and given.get("decoding_type") is None:
        raise UsageError(f"{where}: decoding_type is missing; supported: {tables.MTP.ours}")
    for key, value in given.items():
        if not isinstance(key, str):
            raise UsageError(f"{where}: a key must be text, not {reprlib.repr(key)}")
        name, known = f"{where}: {key}", table.get(key.replace("-", "_"))  # vLLM's YAML has dashes
        if known is None:
            raise UsageError(f"{where}: unknown key {key!r}{_suggest_nearest(key, table)}")
        if isinstance(known, tables.Methods):
            yield from check_method(known.ours if value is None else value, known, name)
        elif isinstance(known, Mapping):
            names = value if isinstance(value, dict) else ()
            if "decoding_type" not in names and {"method", *COUNTS} & {*names}:
                known = tables.VLLM
            yield from read_keys(value, known, name) if value is not None else ()
        elif not known.setting and not known.refused:
            for part, inner in value.items() if isinstance(value, dict) else [("", value)]:
                if nested := known.inside.get(str(part).replace("-", "_")):
                    yield from read_value(inner, nested, f"{name}: {part}".removesuffix(": "))
            yield NOTES, name, (f"{name}: no effect{known.instead and f'; {known.instead}'}",)
        else:
            yield from read_value(value, known, name)


def read_value(value: Any, known: tables.Key, name: str) -> Iterator[Given]:
    """Yield the setting of one key; raise UsageError for a value that can't be."""
    if value is None or (type(value) in (int, str) and value in known.idle):
        return
    if known.true:
        yield known.setting, name, known.true if checked(check_bool, value, name) else None
    elif known.setting:
        yield known.setting, name, checked(CHECKS[known.setting], value, name)
    elif value:
        line = f"{name} {shorten(value)} is not supported by this version"
        raise UsageError(f"{line}; {known.refused}: leave it out")


def check_method(name: object, methods: tables.Methods, where: str) -> Iterator[Given]:
    """Yield a note for a deprecated name of the MTP method; raise UsageError for another method."""
    names = {_spell(method): method for method in (methods.ours, *methods.others)}
    given = _spell(name)
    if given in [_spell(f"{model}_mtp") for model in methods.models]:
        yield NOTES, where, (f"{where} {name!r} is deprecated: write {methods.ours!r}",)
    elif names.get(given) != methods.ours:
        unknown = f"unknown method {name!r:.60}, known: {', '.join(names.values())}"
        other = f"{name!r} is not supported by mtpbuild; supported: {methods.ours}"
        raise UsageError(f"{where}: {other if given in names else unknown}")


def _spell(name: object) -> str:
    return str(name).lower().replace("_", "").replace("-", "")


def _suggest_nearest(key: str, table: tables.Table) -> str:
    """Return a hint for an unknown key: its place, its name in this table, or a similar key."""
    if table is tables.TRTLLM and key in tables.SPECULATIVE:
        return "; it belongs under speculative_config"
    every = {**tables.VLLM, **tables.SPECULATIVE, **tables.TRTLLM}
    ours = {n: known.setting for n, known in every.items() if isinstance(known, tables.Key)}
    same = [n for n in table if ours.get(n) == (ours.get(key) or key)]
    if near := same or difflib.get_close_matches(key, table, 1):
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(n for n in table if n not in ours or ours[n])}"
