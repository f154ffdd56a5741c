"""The model families: each has a folder, and `common` holds the code that they share."""

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from mtpbuild.builder.checkpoint.config import ModelConfig as ModelConfig
from mtpbuild.builder.checkpoint.readable import read_object
from mtpbuild.builder.checkpoint.shards import read_stored_names
from mtpbuild.builder.models.family import Family as Family
from mtpbuild.builder.models.modules import set_modules, with_modules
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.files import read_json

_REGISTERED: dict[str, Family] = {}


def register(family: Family) -> None:
    """Add a family to the built-in ones."""
    _REGISTERED[family.name] = family
    _find_family_by_type.cache_clear()


def families() -> list[Family]:
    """Return the built-in families, then the registered ones."""
    from mtpbuild.builder.models import (
        deepseek_v3,
        deepseek_v4,
        deepseek_v32,
        dense,
        gemma4,
        glm4_moe,
        glm4_moe_lite,
        glm_moe_dsa,
        qwen3_5,
    )

    built_in = (
        deepseek_v3, glm4_moe_lite, deepseek_v32, glm_moe_dsa, deepseek_v4, glm4_moe, qwen3_5,
        gemma4,
    )  # fmt: skip
    built_in_families = (*(module.FAMILY for module in built_in), *dense.FAMILIES)
    return [*built_in_families, *_REGISTERED.values()]


def find_family(raw: Mapping[str, Any]) -> Family:
    """Return the family that a `config.json` names.

    Raises CheckpointError, which lists the known families.
    """
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"architectures must be a list of names, not {reprlib.repr(names)}")
    for family in families():
        if raw.get("model_type") == family.model_type or set(names) & set(family.architectures):
            return family
    wanted = ", ".join(names) or raw.get("model_type") or "none"
    known = ", ".join(f"{family.name} ({family.model_type})" for family in families())
    raise CheckpointError(f"unsupported architecture {wanted}; supported: {known}")


def refuse_class(path: Path) -> None:
    """Raise CheckpointError if a `config.json` names an architecture that is not supported.

    A missing or damaged file passes: `load_config` reports it.
    """
    if raw := read_object(path):
        with name_file(path):
            find_family(raw)


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Begin the message of a CheckpointError with the name of a file."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def find_family_of(config: ModelConfig) -> Family:
    """Return the family to which a configuration belongs."""
    kind: type = type(config)
    return _find_family_by_type(kind)


@cache  # called for every weight
def _find_family_by_type(config: type) -> Family:
    return next(family for family in families() if config is family.config)


def load_config(folder: Path, modules: int | None = None) -> ModelConfig:
    """Read `folder/config.json`; raise CheckpointError, which names the file and its fault.

    modules: the number of MTP modules if they come from other files.
    """
    path = folder / "config.json"
    try:
        raw = read_json(path)
        with name_file(path):
            if not isinstance(raw, dict):
                raise CheckpointError("expected a JSON object")
            family = find_family(raw)
            if modules is not None:
                return family.config.parse(set_modules(family, raw, modules))
            names = read_stored_names(folder)
            config = family.config.parse(with_modules(family, raw, names))
            head = family.find_head(config, raw, names)
            return replace(config, num_nextn_predict_layers=1, head=head) if head else config
    except FileNotFoundError:
        why = "no config.json; give a Hugging Face checkpoint folder"
        raise CheckpointError(f"{folder}: {why}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
