"""Acceptance lengths that others have published, by the shape of the model."""

import tomllib
from typing import Any

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.models import find_family_of
from mtpbuild.builder.plan.recipe import find_recipe_folder


def read_published() -> list[dict[str, Any]]:
    """Read the table that the package ships."""
    path = find_recipe_folder() / "published" / "acceptance.toml"
    rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["published"]
    return rows


def find_published(config: ModelConfig) -> list[dict[str, Any]]:
    """Return what is published of models of this shape."""
    shape = find_family_of(config).model_type, config.hidden_size
    return [row for row in read_published() if (row["model_type"], row["hidden_size"]) == shape]
