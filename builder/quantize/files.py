"""Writes a checkpoint's safetensors files tensor by tensor, in shards when it is large."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE
from mtpbuild.builder.quantize.format import Part

SHARD_LIMIT = 5 * 10**9  # bytes of tensors
SIZES = {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class Shard:
    file: str
    tensors: Mapping[str, Part]

    def header(self) -> bytes:
        """Length and JSON of a safetensors file; data follows in the order of `tensors`."""
        entries, end = {}, 0
        for name, part in self.tensors.items():
            start, end = end, end + nbytes(part)
            offsets = (start, end)
            entries[name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": offsets}
        text = json.dumps({"__metadata__": {"format": "pt"}} | entries, separators=(",", ":"))
        text += " " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text.encode()

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes, self.tensors.values()))


def nbytes(part: Part) -> int:
    return SIZES[part.dtype] * prod(part.shape)


def split(tensors: Mapping[str, Part], limit: int = SHARD_LIMIT) -> list[Shard]:
    """One file if it all fits the limit, else as many as it takes, named as Hugging Face does."""
    groups, size = list[dict[str, Part]]([{}]), 0
    for name, part in tensors.items():
        if groups[-1] and size + nbytes(part) > limit:
            groups.append({})
            size = 0
        groups[-1][name] = part
        size += nbytes(part)
    if len(groups) == 1:
        return [Shard(SINGLE, groups[0])]
    count = len(groups)
    names = (f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count))
    return [Shard(name, group) for name, group in zip(names, groups, strict=True)]


def write_index(folder: Path, shards: Iterable[Shard]) -> None:
    """The index that more than one shard needs."""
    shards = list(shards)
    if len(shards) == 1:
        return
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": {name: shard.file for shard in shards for name in shard.tensors},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def write_shards(
    folder: Path, shards: Iterable[Shard], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Tensors come in the order of the shards; one is in memory at a time."""
    shards, coming = list(shards), iter(tensors)
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.write(shard.header())
            for name, part in shard.tensors.items():
                given, tensor = next(coming)
                assert given == name, f"{given} comes where {name} should"
                data = raw(tensor)
                assert data.nbytes == nbytes(part), f"{name}: {data.nbytes} bytes"
                file.write(data)
    assert next(coming, None) is None
    write_index(folder, shards)


def raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensors_of(pairs: Iterable[tuple[str, Mapping[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
    """Weights with their parts -> stored names and tensors."""
    for name, parts in pairs:
        for suffix, tensor in parts.items():
            yield name + suffix, tensor
