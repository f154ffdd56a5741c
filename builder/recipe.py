"""Recipes: inert TOML data that names a model, its engine and where its checkpoint is."""

import difflib
import os
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from mtpbuild.runtime.errors import CheckpointError, UnknownRecipeError


class Recipe(BaseModel):
    """One file of `mtpbuild.recipes`; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    engine: str  # engines/<engine>_n<nextn>
    description: str
    checkpoint: str  # folder beside the recipe


@dataclass(frozen=True)
class Source:
    """The model to build: a recipe's or a folder's checkpoint."""

    name: str
    engine: str
    folder: Path


def recipe_folder() -> Path:
    return Path(str(files("mtpbuild.recipes")))


def load_recipes() -> list[Recipe]:
    return [parse_recipe(path) for path in sorted(recipe_folder().glob("*.toml"))]


def parse_recipe(path: Path) -> Recipe:
    """Read one recipe; raises CheckpointError that names the bad key and the nearest known one."""
    try:
        return Recipe.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid TOML ({error})") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        near = difflib.get_close_matches(key, list(Recipe.model_fields), 1)
        hint = f"; did you mean {near[0]}?" if first["type"] == "extra_forbidden" and near else ""
        raise CheckpointError(f"{path}: {key}: {first['msg']}{hint}") from None


def find_model(model: str) -> Source:
    """A recipe's name, or a checkpoint folder; raises UnknownRecipeError with the known names."""
    recipes = {recipe.name: recipe for recipe in load_recipes()}
    if model in recipes:
        recipe = recipes[model]
        return Source(recipe.name, recipe.engine, recipe_folder() / recipe.checkpoint)
    folder = Path(model)
    if os.path.isdir(folder):  # never raises, however odd the name
        name = folder.resolve().name
        return Source(name, name, folder)
    raise UnknownRecipeError(
        f"{model!r} is neither a recipe nor a checkpoint folder; recipes: {', '.join(recipes)}"
    )
