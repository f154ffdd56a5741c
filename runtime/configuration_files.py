"""Reading of vLLM's --speculative-config and TensorRT-LLM's YAML file."""

import json
from pathlib import Path
from typing import Any

from mtpbuild.runtime.compat.read import read_keys
from mtpbuild.runtime.compat.tables import TRTLLM, VLLM
from mtpbuild.runtime.configuration import Settings, check_rates, join
from mtpbuild.runtime.errors import MissingDependencyError, UsageError, install

VLLM_FLAG, YAML_FLAG = "--speculative-config", "--config"
SPELLINGS = {"False": "false", "True": "true", "None": "null", "'": "double quotes"}


def parse_speculative_config(text: str) -> Settings:
    """Read vLLM's JSON object; a UsageError names a wrong key and what its value must be."""
    found = join(read_keys(_read_json(text, VLLM_FLAG), VLLM, VLLM_FLAG))
    check_rates(found, VLLM_FLAG)
    return found


def parse_llm_yaml(path: Path) -> Settings:
    """Read TensorRT-LLM's YAML file; a UsageError names a wrong key and what its value must be."""
    where = f"{YAML_FLAG} {path}"
    return join(read_keys(_read_yaml(path, where), TRTLLM, where))


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
        raise UsageError(f"{where}: not JSON {_place(text, error.pos)}") from None
    except RecursionError:
        raise UsageError(f"{where}: not JSON, nested too deep") from None


def _read_yaml(path: Path, where: str) -> object:
    """Read a YAML file of plain values; its two upper levels may have no key twice."""
    try:
        import yaml
    except ModuleNotFoundError:
        need = f"needs PyYAML: {install('yaml')}"
        raise MissingDependencyError(f"{where}: {need}") from None
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


def _place(text: str, at: int) -> str:
    rest = text[at:]
    if not rest:
        return "at its end"
    said = next((spelling for spelling in SPELLINGS if rest.startswith(spelling)), None)
    hint = f": JSON writes {SPELLINGS[said]}, not {said}" if said else ""
    return f"at character {at + 1}, {rest[:20]!r}{hint}"


def _check_distinct(node: Any, where: str) -> None:
    """Raise UsageError for duplicate keys, which YAML's loader accepts, in the upper two levels."""
    seen = set[str]()
    for key, value in node.value if node is not None and node.id == "mapping" else ():
        name = key.value if key.id == "scalar" else ""
        if name and name in seen:
            line = key.start_mark.line + 1
            raise UsageError(f"{where}: {name!r} is given twice, again in line {line}")
        seen.add(name)
        if name == "speculative_config":
            _check_distinct(value, where)
