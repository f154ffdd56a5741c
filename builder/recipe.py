"""Recipes: inert TOML data that names a model, its engine and where its checkpoint is."""

import difflib
import os
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mtpbuild.runtime.errors import (
    CheckpointError,
    MissingWeightsError,
    UnknownRecipeError,
    UsageError,
)

CHECKPOINTS = Path("checkpoints")  # of the current folder
TARGET = "onnxruntime"  # that all else is built for


class Recipe(BaseModel):
    """One file of `mtpbuild.recipes`; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    engine: str  # engines/<engine>_n<nextn>
    description: str
    config: str  # folder beside the recipe, with config.json
    layout: Literal["bf16", "fp8", "nvfp4", "nvfp4-v2", "int8", "int4"]  # how weights are stored
    target: str = TARGET  # that it is built for, unless --target says another
    shipped: bool = False  # the weights are in that folder too
    repository: str | None = None  # of Hugging Face
    made_from: str | None = None  # the recipe that `mtpbuild quantize` makes it from

    @property
    def config_folder(self) -> Path:
        return recipe_folder() / self.config

    def find_weights(self) -> Path:
        """The checkpoint's folder; raises MissingWeightsError that says how to get it."""
        here = CHECKPOINTS / self.name
        cached = None if self.repository is None else cached_snapshot(self.repository)
        places = (self.config_folder if self.shipped else None, here, cached)
        for place in places:
            if place is not None and (place / "config.json").is_file():
                return place
        command = f"mtpbuild quantize --model {self.made_from} --to {self.layout} --out {here}"
        if self.repository is not None:
            command = f"hf download {self.repository} --local-dir {here}"
        how = f"`{command}`, or name their folder with --checkpoint"
        raise MissingWeightsError(f"{self.name} has no weights here: {how}")


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


def find_model(model: str, checkpoint: Path | None = None) -> Source:
    """A recipe with its weights, from `checkpoint` if given, or a checkpoint folder.

    Raises UnknownRecipeError with the known names, MissingWeightsError with what to do.
    """
    recipe = find_recipe(model)
    if recipe is not None:
        return Source(recipe.name, recipe.engine, checkpoint or recipe.find_weights())
    if checkpoint is not None:
        raise UsageError(f"--checkpoint holds a recipe's weights; --model {model} is none")
    folder = Path(model)
    if os.path.isdir(folder):  # never raises, however odd the name
        name = folder.resolve().name
        return Source(name, name, folder)
    known = ", ".join(recipe.name for recipe in load_recipes())
    raise UnknownRecipeError(
        f"{model!r} is neither a recipe nor a checkpoint folder; recipes: {known}"
    )


def find_recipe(name: str) -> Recipe | None:
    return next((recipe for recipe in load_recipes() if recipe.name == name), None)


def default_target(model: str) -> str:
    """What a model is built for unless the command line says it."""
    recipe = find_recipe(model)
    return TARGET if recipe is None else recipe.target


def cached_snapshot(repository: str) -> Path | None:
    """A repository's newest download in the cache of huggingface_hub, if there is one."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    folder = cache / f"models--{repository.replace('/', '--')}"
    try:
        return folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
