"""Find the model that `--model` names: a recipe, a folder, or a repository of Hugging Face.

A recipe is a TOML file, without code, that names a model, its engine and its checkpoint's place.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mtpbuild.builder.checkpoint.hub_cache import find_cached_snapshot
from mtpbuild.builder.checkpoint.readable import refuse_quantised
from mtpbuild.builder.checkpoint.side_files import CONFIG
from mtpbuild.builder.gguf.choice import ENDING
from mtpbuild.builder.models import refuse_class
from mtpbuild.builder.weights.gguf_folder import find_cached_gguf, find_checkpoint_folder
from mtpbuild.runtime import errors
from mtpbuild.runtime.checks import did_you_mean

CHECKPOINTS = Path("checkpoints")  # in the current folder
HEAD_CONFIG = "head.json"  # the head's config.json, in a recipe's folder
PROMPT_SETS = ("code", "reasoning")  # data sets of prompts
DEFAULT_TARGET = "onnxruntime"  # for models whose recipe names no target
NEAREST = 5  # recipes that a message about an unknown name lists
# OWNER/NAME, and after a colon which of its GGUF files
REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::(\w[\w.-]*))?", re.ASCII)
# Repositories of one model append the format of its weights to its name.
FORMAT = re.compile(r"[-_.](gguf|awq|gptq|bnb|bf16|fp8|fp4|nvfp4|int8|int4|[48]-?bit).*", re.I)


class Recipe(BaseModel):
    """One file of `mtpbuild.recipes`; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    engine: str  # engines/<engine>_n<nextn>
    description: str
    config: str  # folder beside the recipe, with config.json
    # How weights are stored.
    layout: Literal["bf16", "fp8", "fp8-fp4", "nvfp4", "nvfp4-v2", "int8", "int4"]
    target: str = DEFAULT_TARGET  # unless --target names another
    shipped: bool = False  # the weights are in that folder too
    repository: str | None = None  # on Hugging Face
    head: str | None = None  # drafts for this model: a repository there, or a folder beside
    download: int | float | None = None  # GB that a build reads of it
    copies: bool = False  # its MTP layers repeat embedding and head
    made_from: str | None = None  # the recipe of the model that `mtpbuild quantize` reads

    @property
    def config_folder(self) -> Path:
        return find_recipe_folder() / self.config

    @property
    def head_folder(self) -> Path | None:
        """The folder of a head that is shipped; None: it is in a repository, or there is none."""
        folder = find_recipe_folder() / (self.head or "")
        return folder if self.head and folder.is_dir() else None

    @property
    def summary(self) -> str:
        """The description, with the size of a build's download."""
        size = "" if self.download is None else f"; {self.download} GB"
        return self.description + size


@dataclass(frozen=True)
class FoundModel:
    """The model to build, with the folder of its checkpoint."""

    name: str
    engine: str
    folder: Path
    mtp: Path | None = None  # a file or folder with the MTP modules, if they lie elsewhere
    # In place of the checkpoint's templates: the user's file, or a shipped one if it has none.
    chat_template: Path | None = None


@dataclass(frozen=True)
class Model:
    """A model that `--model` names, whether its weights are on this machine or not.

    It is a recipe, a folder or a repository. The weights of a recipe without a repository are
    quantised from another recipe's.
    """

    name: str
    engine: str
    recipe: Recipe | None = None
    folder: Path | None = None
    repository: str | None = None
    file: str | None = None  # names a GGUF file of the repository

    def find_weights(self, revision: str | None = None) -> Path | None:
        """Return the checkpoint's folder or GGUF file, or None if it is not on this machine.

        With a revision only a download of the repository counts.
        """
        if self.folder is not None:
            return self.folder
        if self.recipe is not None and revision is None:
            here = CHECKPOINTS / self.name
            for place in (self.recipe.config_folder if self.recipe.shipped else None, here):
                if place is not None and (place / CONFIG).is_file():
                    return place
        if self.repository is not None and self.file is not None:
            return find_cached_gguf(self.repository, self.file, revision)
        return None if self.repository is None else find_cached_snapshot(self.repository, revision)

    def missing(
        self, revision: str | None = None, unreached: tuple[str, str] | None = None
    ) -> errors.MissingWeightsError:
        """Return the error that says how to get the weights.

        unreached: why the hub could not be asked for them, and what to do.
        """
        if self.recipe is not None and self.recipe.made_from is not None:
            command = f"mtpbuild quantize --model {self.recipe.made_from} --to {self.recipe.layout}"
            how = f"`{command} --out {CHECKPOINTS / self.name}`, or name their folder with"
            return errors.MissingWeightsError(
                f"{self.name} has no weights here: {how} --checkpoint"
            )
        flags = "" if revision is None else f" --revision {revision}"
        what = self.name if self.recipe else f"{self.name}: no such folder, and the repository"
        size = f" ({self.recipe.download} GB)" if self.recipe and self.recipe.download else ""
        if unreached is not None:
            why, todo = unreached
            lacking = "not downloaded" if self.recipe else "neither a folder nor downloaded"
            return errors.MissingWeightsError(
                f"{why}, and {self.name} is {lacking} here{size}: {todo}, or name a folder that "
                "has it with --checkpoint"
            )
        other = "" if self.file else f"or `hf download {self.repository}{flags}` "
        return errors.MissingWeightsError(
            f"{what} is not downloaded here: `mtpbuild build --model {self.name}{flags}` "
            f"{other}fetches it{size}, or name a folder that has it "
            "with --checkpoint"
        )


def find_recipe_folder() -> Path:
    return Path(str(files("mtpbuild.recipes")))


def find_shipped_template(model_type: str) -> Path | None:
    """Return the chat template for models of this type whose repositories have none."""
    path = find_recipe_folder() / "chat_templates" / f"{model_type}.jinja"
    return path if path.is_file() else None


def load_recipes() -> list[Recipe]:
    return [parse_recipe(path) for path in sorted(find_recipe_folder().glob("*.toml"))]


def parse_recipe(path: Path) -> Recipe:
    """Read a recipe; raise CheckpointError, which names the bad key and the nearest known one."""
    try:
        return Recipe.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise errors.CheckpointError(f"{path}: not valid TOML ({error})") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        unknown = first["type"] == "extra_forbidden"
        hint = did_you_mean(key, Recipe.model_fields) if unknown else ""
        raise errors.CheckpointError(f"{path}: {key}: {first['msg']}{hint}") from None


def find_model(
    model: str, checkpoint: Path | None = None, revision: str | None = None
) -> FoundModel:
    """Find a model and its weights, in `checkpoint` if given; download nothing.

    Raises UnknownRecipeError, which lists the recipes, or MissingWeightsError, which says how to
    get the weights.
    """
    named = name_model(model)
    if checkpoint is not None and named.folder is not None:
        raise errors.UsageError(
            f"--model {model} is a folder or file already: leave --checkpoint out"
        )
    if revision is not None and (checkpoint is not None or named.repository is None):
        raise errors.UsageError(
            "--revision needs a Hugging Face repository, the weights are a folder's: leave it out"
        )
    folder = checkpoint or named.find_weights(revision)
    if folder is None:
        raise named.missing(revision)
    refuse_class(folder / CONFIG)  # nobody asks for another format of a model that isn't built
    instead = suggest_instead_of(named.repository or folder.resolve().name)
    refuse_quantised(folder, folder, instead)
    return FoundModel(named.name, named.engine, find_checkpoint_folder(folder))


def name_model(model: str) -> Model:
    """Return the recipe of this name or repository, else the folder, else the repository.

    A folder wins over a repository of the same name. Raises UnknownRecipeError.
    """
    recipe = find_recipe(model)
    if recipe is not None:
        return Model(recipe.name, recipe.engine, recipe=recipe, repository=recipe.repository)
    folder = Path(model)
    if os.path.isdir(folder):  # unlike Path.is_dir, it never raises
        name = folder.resolve().name
        return Model(name, name, folder=folder)
    if folder.suffix == ENDING:
        if not os.path.isfile(folder):
            raise errors.CheckpointError(f"{model}: no such file{suggest_instead_of(folder.stem)}")
        return Model(folder.stem, folder.stem, folder=folder)
    if os.path.isfile(folder):
        raise errors.CheckpointError(f"{model} is a file; give its folder: --model {folder.parent}")
    if match := REPOSITORY.fullmatch(model):
        engine = model.partition("/")[2].replace(":", "-")
        return Model(model, engine, repository=match[1], file=match[2])
    names = [recipe.name for recipe in load_recipes()]
    nearest = difflib.get_close_matches(model.lower(), names, NEAREST, cutoff=0)
    raise errors.UnknownRecipeError(
        f"{model!r} is neither a recipe nor a checkpoint folder, nor OWNER/NAME of a Hugging Face "
        f"repository: `mtpbuild recipes` lists all recipes, the nearest are {', '.join(nearest)}"
    )


def find_recipe(name: str) -> Recipe | None:
    """Return the recipe of this name, or the one whose repository has this name.

    Capitals do not count, the owner may be left out, and `:` is a hyphen: `qwen3.5:4b`.
    """
    recipes = load_recipes()
    by_name = {recipe.name: recipe for recipe in recipes}
    if name in by_name or os.path.isdir(name):
        return by_name.get(name)
    typed = name.lower().replace(":", "-")

    def is_named(recipe: Recipe) -> bool:
        repository = (recipe.repository or recipe.name).lower()
        return typed in (recipe.name, repository, repository.rpartition("/")[2])

    return next(filter(is_named, recipes), None)


def choose_default_target(model: str) -> str:
    """Return the target of a model if the command line names none."""
    recipe = find_recipe(model)
    return DEFAULT_TARGET if recipe is None else recipe.target


def suggest_instead_of(name: str, made_from: Sequence[str] = ()) -> str:
    """Return the end of a message that refuses a format: another model to build, or "".

    name: of the folder or repository. made_from: the base models that its model card names.
    """
    base_name = strip_model_name(name)
    recipes = {recipe.repository: recipe for recipe in load_recipes() if recipe.repository}
    same = [
        r for r in recipes if r != name and (r in made_from or strip_model_name(r) == base_name)
    ]
    if same:  # base models first, then the shortest name, as it has no format appended
        best = min(same, key=lambda r: (r not in made_from, len(r.partition("/")[2])))
        return f"; --model {recipes[best].name} ({best}) is the same model"
    return f"; it was made from --model {made_from[0]}" if made_from else ""


def strip_model_name(name: str) -> str:
    """Strip the owner and the format of the weights from a folder's or repository's name."""
    return FORMAT.sub("", name.rpartition("/")[2]).casefold()


def find_built_in(name: str) -> Path:
    """Find the file of a built-in dataset or task."""
    return find_recipe_folder() / "deepseek_tiny_bench" / f"{name}.jsonl"
