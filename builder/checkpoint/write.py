"""Writes safetensors files tensor by tensor, in shards when they are many bytes."""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE
from mtpbuild.builder.quantize.formats import Part

SHARD_LIMIT = 5 * 10**9  # bytes of tensors
ALIGNMENT = 64  # of the first byte of data, for memory mapping
TYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclass(frozen=True)
class Shard:
    """One file; `metadata` as Hugging Face's libraries look for it."""

    file: str
    tensors: Mapping[str, Part]
    metadata: bool = True

    def header(self) -> bytes:
        """Length and JSON of a safetensors file; data follows in the order of `tensors`."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}} if self.metadata else {}
        end = 0
        for name, part in self.tensors.items():
            span = (end, end := end + nbytes(part))
            entries[name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": span}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes, self.tensors.values()))


def nbytes(part: Part) -> int:
    return TYPES[part.dtype].itemsize * prod(part.shape)


def split(tensors: Mapping[str, Part], limit: int = SHARD_LIMIT) -> list[Shard]:
    """One file if it all fits the limit, else as many as it takes, named as Hugging Face does."""
    groups, size = list[dict[str, Part]]([{}]), 0
    for name, part in tensors.items():
        if groups[-1] and size + nbytes(part) > limit:
            groups.append({})
            size = 0
        groups[-1][name] = part
        size += nbytes(part)
    if (count := len(groups)) == 1:
        return [Shard(SINGLE, groups[0])]
    name = f"model-{{:05d}}-of-{count:05d}.safetensors"
    return [Shard(name.format(i), group) for i, group in enumerate(groups, start=1)]


def write_index(folder: Path, shards: list[Shard]) -> None:
    """The index that more than one shard needs."""
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
            "weight_map": {name: shard.file for shard in shards for name in shard.tensors},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def write_shards(folder: Path, shards: list[Shard], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors as they come; one is in memory at a time.

    A tensor may come as several of the same name, its rows in turn, with others between them.
    """
    places = dict[str, Place]()
    with ExitStack() as files:
        for shard in shards:
            file = files.enter_context((folder / shard.file).open("wb"))
            at = file.write(shard.header())
            for name, part in shard.tensors.items():
                places[name] = Place(file, TYPES[part.dtype], at, at := at + nbytes(part))
        for name, piece in tensors:
            places[name].write(piece)
    for name, place in places.items():
        assert place.at == place.end, f"{name}: {place.end - place.at} bytes are missing"
    write_index(folder, shards)


@dataclass
class Place:
    """The bytes of a tensor in an open file; those before `at` are written."""

    file: BinaryIO
    dtype: torch.dtype
    at: int
    end: int

    def write(self, piece: Tensor) -> None:
        """Append the tensor's next rows."""
        if self.file.tell() != self.at:
            self.file.seek(self.at)
        self.at += self.file.write(raw(piece.to(self.dtype)))
        assert self.at <= self.end, f"{self.at - self.end} bytes too many"


def raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
