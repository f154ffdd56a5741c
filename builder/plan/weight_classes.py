"""Counts of a checkpoint's weights by class: bytes stored, bytes per rank, and parameters."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.checkpoint.readable import name_stored_format, read_quantisation
from mtpbuild.builder.checkpoint.shards import has_weights
from mtpbuild.builder.formats import Entry, Format, Shape
from mtpbuild.builder.formats.format import NAMES, SIZES
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.models.common.copies import EMBEDDING, HEAD
from mtpbuild.builder.models.common.weight import Share, StoredTensor, stays_fp32
from mtpbuild.builder.models.heads import join_config
from mtpbuild.builder.plan.recipe import HEAD_CONFIG, Recipe, find_model, find_recipe
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.head import read_head_config
from mtpbuild.builder.weights.quantised_view import format_by
from mtpbuild.builder.weights.scheme import SCHEMES, UNQUANTISED, Scheme
from mtpbuild.builder.weights.table import FormatOf, WeightTable, choose_formats, make_family_table
from mtpbuild.runtime.files import read_json
from mtpbuild.runtime.ranks import ALONE, Ranks

ROUTED = re.compile(r"\.experts\.\d+\.")  # a routed expert in a weight's name
TIED = "embedding, head"  # one tensor is both
MAIN, MODULES, COPIES = "main model", "MTP layers", "copies in MTP layers"


@dataclass
class WeightClass:
    """A class of weights, of the main model or (`module`) of the MTP modules.

    bytes: as stored. per_rank: the bytes that one rank holds, and parameters_per_rank its values.
    """

    name: str
    module: bool
    parameters: int = 0
    bytes: int = 0
    per_rank: float = 0.0
    parameters_per_rank: float = 0.0
    formats: Counter[str] = field(default_factory=Counter)  # bytes in each

    @property
    def format(self) -> str:
        """The format of most of its bytes."""
        return self.formats.most_common(1)[0][0]


@dataclass(frozen=True)
class CheckpointPortion:
    """The parameters and stored bytes of a part of a checkpoint."""

    parameters: int
    bytes: int


@dataclass(frozen=True)
class CheckpointLayout:
    """The format in which a checkpoint stores each weight, from its files or its recipe."""

    name: str
    config: ModelConfig
    format: FormatOf
    plain: Callable[[StoredTensor], str]  # dtype of a weight that is not quantised
    repeated: bool  # MTP layers hold copies of embedding and head

    def parts(self, stored: StoredTensor, format: Format | None) -> dict[str, Entry]:
        """Return the tensors that make up a weight in its format."""
        if format is not None:
            return format.parts(stored.shape)
        return {"": Entry(self.plain(stored), stored.shape)}


def load_recipe_config(recipe: Recipe) -> ModelConfig:
    """Read the configuration of a recipe, with that of its head if it has one."""
    config = load_config(recipe.config_folder)
    if recipe.head is None:
        return config
    if recipe.head_folder is not None:
        return read_head_config(recipe.head_folder, recipe.config_folder, config)
    return join_config(config, read_json(recipe.config_folder / HEAD_CONFIG))


def find_layout(model: str, checkpoint: Path | None) -> CheckpointLayout:
    """Find a model's layout: in a recipe, which needs no weights, or in a folder's headers."""
    recipe = find_recipe(model)
    if recipe is not None and checkpoint is None:
        config, scheme = load_recipe_config(recipe), SCHEMES[recipe.layout]
        return CheckpointLayout(
            recipe.name,
            config,
            lambda stored: format_by(scheme, config, stored),
            lambda stored: "F32" if stored.name.endswith("_bias") else "BF16",
            repeated=recipe.copies,
        )
    source = find_model(model, checkpoint)
    config = load_config(source.folder)
    if not has_weights(source.folder):
        said = find_formats(source.folder, config)
        return CheckpointLayout(source.name, config, said, lambda stored: "BF16", repeated=False)
    opened = open_checkpoint(source.folder)
    config = opened.settle(config)
    opened.check(config)
    return CheckpointLayout(
        source.name,
        config,
        lambda stored: opened.format(stored.name),
        lambda stored: opened.tensors[stored.name].dtype,
        repeated=any(name in opened.tensors for name in find_family_of(config).duplicates(config)),
    )


def find_formats(folder: Path, config: ModelConfig, scheme: Scheme | None = None) -> FormatOf:
    """Return the format of each weight by a scheme, else by the settings of a checkpoint.

    Both need no weights.
    """
    settings = read_quantisation(folder)
    return lambda stored: format_by(
        scheme or SCHEMES[name_stored_format(settings, stored.name)], config, stored
    )


def count_classes(
    layout: CheckpointLayout, ranks: Ranks, style: GraphStyle | None = None
) -> list[WeightClass]:
    """Count the weights of every class, the main model's first.

    style: of the engines for GPUs whose bytes `per_rank` counts. None: tensors are held as stored.
    """
    classes: dict[tuple[str, bool], WeightClass] = {}
    table = make_family_table(layout.config, ranks)
    formats = {stored.name: layout.format(stored) for stored in table.stored.values()}
    held = {} if style is None else count_held_bytes(formats, table, style)
    # A layer's experts are alike: they are most of R1's 46,000 weights.
    alike = defaultdict[Any, list[StoredTensor]](list)
    for stored in table.stored.values():
        name, format = stored.name, formats[stored.name]
        dtype = layout.plain(stored) if format is None else ""
        shape = stored.shape, stored.axis, stored.routed
        alike[ROUTED.sub(".experts.", name), shape, format, dtype, held.get(name)].append(stored)
    for (*_, format, _, of_rank), (stored, *others) in alike.items():
        key, count = classify(layout.config, stored.name), 1 + len(others)
        weights = classes.setdefault(key, WeightClass(*key))
        weights.parameters += (values := count * prod(stored.shape))
        weights.parameters_per_rank += values * compute_fraction_per_rank(
            stored, stored.shape, ranks
        )
        for entry in layout.parts(stored, format).values():
            weights.bytes += (size := count * entry.nbytes)
            weights.formats[UNQUANTISED if format is None else format.name] += size
            if of_rank is None:
                weights.per_rank += size * compute_fraction_per_rank(stored, entry.shape, ranks)
        weights.per_rank += count * (of_rank or 0)
    return sorted(classes.values(), key=lambda weights: weights.module)


def count_held_bytes(
    formats: Mapping[str, Format | None], table: WeightTable, style: GraphStyle
) -> dict[str, float]:
    """Return the bytes that a rank of an engine for GPUs holds of each stored weight.

    formats: the weights' in the checkpoint, by name.
    """
    share, portions = Share(table.ranks), dict[str, float]()
    for weight in choose_formats(table, lambda stored: formats[stored.name], style):
        floats = SIZES["F32" if stays_fp32(weight.name, style.for_gpu) else NAMES[style.dtype]]
        group = 0 if weight.format is None else weight.scale_group(share)
        sizes = dict[Any, float]()  # of tensors with the same shape and format
        for stored, format in weight.formats_by_stored:
            if (kind := (stored.shape, stored.axis, stored.routed, format)) not in sizes:
                shape = share.shape(stored)
                if format is None:
                    size = prod(shape) * floats
                else:
                    parts = format.engine_entries(shape, group, weight.concat_axis)
                    size = sum(entry.nbytes for entry in parts)
                sizes[kind] = size / (table.ranks.ep if stored.routed else 1)
            portions[stored.name] = sizes[kind]
    return portions


def count_engine_classes(
    config: ModelConfig,
    format_of: FormatOf,
    style: GraphStyle,
    ranks: Ranks = ALONE,
) -> list[WeightClass]:
    """Count the weights of an engine.

    format_of: a weight's format in the checkpoint that it is built of. A tied embedding counts as
    fp32 if the head is.
    """
    table = choose_formats(make_family_table(config, ranks), format_of, style)
    held = table.stored_formats
    fp32 = {
        stored.name
        for weight in table.weights
        if stays_fp32(weight.name, style.for_gpu)
        for stored in weight.stored
    }

    def name_dtype(stored: StoredTensor) -> str:
        return "F32" if stored.name in fp32 else NAMES[style.dtype]

    engine = CheckpointLayout("", config, lambda s: held[s.name], name_dtype, repeated=False)
    classes = count_classes(engine, ranks)
    twice = [weights for weights in classes if weights.name == TIED and not table.shares_embedding]
    return classes + [replace(weights, name="embedding") for weights in twice]


def count_file_bytes(classes: Iterable[WeightClass]) -> int:
    """Count the bytes of a rank's weights file."""
    return round(sum(weights.per_rank for weights in classes))


def compute_fraction_per_rank(stored: StoredTensor, shape: Shape, ranks: Ranks) -> float:
    """Return the fraction of a stored tensor that one rank holds.

    shape: of the tensor, which may hold a quantised weight's scales; a scalar can't be split.
    """
    if stored.routed:
        return 1 / (ranks.tp if shape else ranks.ep)
    return 1 / ranks.parts if shape and stored.axis is not None else 1.0


def classify(config: ModelConfig, name: str) -> tuple[str, bool]:
    """Find a tensor's class, and whether it belongs to an MTP module."""
    family = find_family_of(config)
    place = family.place(config, name)
    if name in family.tables:
        return "embedding", False
    if place is None:
        tied = config.tie_word_embeddings
        heads = {HEAD: "head", EMBEDDING: TIED if tied else "embedding"}
        return heads.get(name, "router, norms"), False
    layer, rest = place
    if config.head and rest.removesuffix(".weight") in config.head.heads:
        return "head", True
    return family.find_kind(rest), layer >= config.num_hidden_layers


def sum_portions(
    layout: CheckpointLayout, classes: list[WeightClass]
) -> dict[str, CheckpointPortion]:
    """Add up the files' tensors: the main model, its MTP modules, copies in their layers."""
    config, by_key = layout.config, {(weights.name, weights.module): weights for weights in classes}
    originals = find_family_of(config).duplicates(config).values() if layout.repeated else ()
    parts = {
        MAIN: [weights for weights in classes if not weights.module],
        MODULES: [weights for weights in classes if weights.module],
        COPIES: [by_key[classify(config, name)] for name in originals],
    }
    return {
        name: CheckpointPortion(sum(c.parameters for c in part), sum(c.bytes for c in part))
        for name, part in parts.items()
    }
