"""Configuration texts as plain values: JSON and YAML, with errors that say where it breaks."""

import json
import reprlib
from pathlib import Path
from typing import Any

from mtpbuild.runtime.errors import MissingDependencyError, UsageError

SPELLINGS = {"False": "false", "True": "true", "None": "null", "'": "double quotes"}


def read_json(text: str, where: str) -> dict[str, Any]:
    """A JSON object; no key twice."""

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise UsageError(f"{where}: {key!r} is given twice")
        return dict(pairs)

    try:
        return as_object(json.loads(text, object_pairs_hook=distinct), where)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON {_place(text, error.pos)}") from None
    except RecursionError:
        raise UsageError(f"{where}: not JSON, nested too deep") from None


def read_yaml(path: Path, where: str) -> dict[str, Any]:
    """A YAML file that holds an object; no key twice, nothing but plain values."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingDependencyError(
            f"{where}: needs PyYAML: pip install 'mtpbuild[yaml]'"
        ) from None
    try:
        text = path.read_text(encoding="utf-8")
        _check_distinct(yaml.compose(text, Loader=yaml.SafeLoader), where)
        return as_object(yaml.safe_load(text), where)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        # a file that can't be read; a value that doesn't fit its tag, such as `!!bool x`
        raise UsageError(f"{where}: can't be read ({error})") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", "nested too deep")
        raise UsageError(f"{where}: not YAML{place} ({problem})") from None


def as_object(raw: object, where: str) -> dict[str, Any]:
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
    """YAML's loader takes the last of two equal keys; look at the file and one level below."""
    seen = set[str]()
    for key, value in node.value if node is not None and node.id == "mapping" else ():
        name = key.value if key.id == "scalar" else ""
        if name and name in seen:
            line = key.start_mark.line + 1
            raise UsageError(f"{where}: {name!r} is given twice, again in line {line}")
        seen.add(name)
        if name == "speculative_config":
            _check_distinct(value, where)
