"""Writes a checkpoint in `mtpbuild quantize`'s format with random blocks; it quantises nothing.

The scale of the weights keeps activations at their size, so that values stay finite and tokens
choose different experts. In products the standard deviation is near one over the root of the number
of inputs, in embeddings near 1; norms' factors are 1 and biases 0. Only some MB are in memory at a
time.
"""

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtpbuild.builder.checkpoint.config import HEAD
from mtpbuild.builder.checkpoint.side_files import CONFIG
from mtpbuild.builder.compiler.quantize import quantization_config
from mtpbuild.builder.formats import Entry, Format
from mtpbuild.builder.formats.format import SIZES
from mtpbuild.builder.models import ModelConfig, find_family_of
from mtpbuild.builder.models.common.weight import WHOLE, StoredTensor, Weight
from mtpbuild.builder.weights.placed import split_into_shards, write_shards
from mtpbuild.builder.weights.quantised_view import format_by
from mtpbuild.builder.weights.table import list_weights
from mtpbuild.runtime.ranks import ALONE
from one.shapes import Shape

PIECE = 1 << 26  # most bytes in memory at once
ROWS = 128  # rows of normal values; they are quantised once, and their scales are repeated


def write_checkpoint(folder: Path, shape: Shape) -> None:
    """Write the shape's checkpoint, unless the folder has one."""
    write(folder, shape, shape.config, shape.raw, "")


def write_head(folder: Path, shape: Shape) -> None:
    """Write the head that is published apart, unless the folder has one."""
    assert shape.head is not None
    write(folder, shape, shape.joined, shape.head, f"{HEAD}.")


def write(
    folder: Path, shape: Shape, config: ModelConfig, raw: Mapping[str, Any], prefix: str
) -> None:
    """Write the tensors whose names begin with a prefix, which they lose."""
    if (folder / CONFIG).exists():
        return
    scheme = shape.scheme
    folder.mkdir(parents=True, exist_ok=True)
    found = {s.name: s for s in sources(config) if s.name.startswith(prefix)}
    formats = {name: format_by(scheme, config, source) for name, source in found.items()}
    parts = {
        name.removeprefix(prefix) + suffix: part
        for name, source in found.items()
        for suffix, part in stored(source, formats[name]).items()
    }
    made = tensors(config, found, formats)
    values = ((n.removeprefix(prefix), value) for n, value in made)
    write_shards(folder, split_into_shards(parts), values)
    quantised = {} if scheme.main is None else {"quantization_config": quantization_config(scheme)}
    (folder / CONFIG).write_text(json.dumps({**raw, **quantised}, indent=1) + "\n", "utf-8")


def sources(config: ModelConfig) -> Iterator[StoredTensor]:
    for weight in list_weights(config, WHOLE):
        yield from weight.stored


def stored(source: StoredTensor, format: Format | None) -> dict[str, Entry]:
    if format is not None:
        return format.parts(source.shape)
    dtype = "I64" if source.has_ids else "F32" if source.name.endswith("bias") else "BF16"
    return {"": Entry(dtype, source.shape)}


def tensors(
    config: ModelConfig,
    found: dict[str, StoredTensor],
    formats: dict[str, Format | None],
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the checkpoint, some rows at a time."""
    table = list_weights(config, WHOLE)
    looked_up = {source.name for weight in table if weight.looked_up for source in weight.stored}
    experts = find_family_of(config).costs(config, ALONE).experts
    torch.manual_seed(0)
    random = np.random.Generator(np.random.SFC64(0))
    for name, source in found.items():
        tied = config.tie_word_embeddings  # then the embedding is also the head
        deviation = 1.0 if name in looked_up and not tied else source.shape[-1] ** -0.5
        format = formats[name]
        if source.has_ids:  # such as those of a token's experts, which differ from each other
            yield name, torch.arange(prod(source.shape)).reshape(source.shape) % max(experts, 1)
            continue
        if format is None:
            yield from ((name, piece) for piece in plain(source, deviation, neutral(table, name)))
            continue
        normal = torch.randn(ROWS, source.shape[1]) * deviation
        amax = normal.abs().max() if format.needs_amax else None
        like = format.encode(normal, amax)
        for suffix, part in format.parts(source.shape).items():
            yield from ((name + suffix, p) for p in pieces(part, like[suffix], random))


def neutral(table: list[Weight], name: str) -> float:
    """Return a vector's value: 0 for a bias; for a norm, the stored value whose factor is 1."""
    if name.endswith("bias"):
        return 0.0
    norms = (w for w in table if name in [s.name for s in w.stored] and "norm" in name)
    return next((1.0 - float(norm.transform(torch.zeros(1))) for norm in norms), 1.0)


def plain(source: StoredTensor, deviation: float, value: float) -> Iterator[Tensor]:
    if len(source.shape) == 1:
        yield torch.full(source.shape, value)
        return
    step = max(1, PIECE // (4 * prod(source.shape[1:])))
    for start in range(0, source.shape[0], step):
        rows = min(step, source.shape[0] - start)
        yield torch.randn(rows, *source.shape[1:]) * deviation


def pieces(part: Entry, like: Tensor, random: np.random.Generator) -> Iterator[Tensor]:
    """Yield a stored tensor in pieces: random packed values, and scales from normal values."""
    if not part.shape:
        yield like
        return
    row = prod(part.shape[1:])
    step = max(1, PIECE // (row * SIZES[part.dtype]))
    for start in range(0, part.shape[0], step):
        rows = min(step, part.shape[0] - start)
        if part.dtype == "U8":
            words = random.integers(0, 2**64, -(-rows * row // 8), np.uint64)
            yield torch.from_numpy(words.view(np.uint8)[: rows * row])
        else:
            yield like[torch.arange(start, start + rows) % len(like)]
