"""Write safetensors files tensor by tensor, and find where each tensor lies in them."""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE
from mtpbuild.builder.formats import Entry
from mtpbuild.runtime.safetensors_header import encode_header, make_header, read_header

SHARD_LIMIT = 5 * 10**9  # bytes of tensors in a file


@dataclass(frozen=True)
class ByteRange:
    """The place of a tensor's bytes in its file."""

    offset: int
    size: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file; `metadata` adds the header entry that Hugging Face's tools expect."""

    file: str
    tensors: Mapping[str, Entry]
    metadata: bool = True

    def header(self) -> bytes:
        """Return the bytes before the data, in which tensors lie in the order of `tensors`."""
        tensors = ((n, e.dtype, e.shape, e.nbytes) for n, e in self.tensors.items())
        return encode_header(make_header(tensors), {"format": "pt"} if self.metadata else None)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())


def split_into_shards(tensors: Mapping[str, Entry], limit: int = SHARD_LIMIT) -> list[Shard]:
    """Split tensors into files of at most `limit` bytes, named as Hugging Face names them."""
    groups, size = list[dict[str, Entry]]([{}]), 0
    for name, entry in tensors.items():
        if groups[-1] and size + entry.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = entry
        size += entry.nbytes
    if (count := len(groups)) == 1:
        return [Shard(SINGLE, groups[0])]
    name = f"model-{{:05d}}-of-{count:05d}.safetensors"
    return [Shard(name.format(i), group) for i, group in enumerate(groups, start=1)]


def write_index(folder: Path, shards: list[Shard]) -> None:
    """Write the index, if there are several shards."""
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
            "weight_map": {name: shard.file for shard in shards for name in shard.tensors},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def write_shards(folder: Path, shards: list[Shard], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors in the order in which they come; only one is in memory at a time.

    A tensor may come in pieces of some rows, with other tensors in between.
    """
    files, at, end = dict[str, BinaryIO](), dict[str, int](), dict[str, int]()
    dtypes = {name: each.type for shard in shards for name, each in shard.tensors.items()}
    with ExitStack() as opened:
        for shard in shards:
            file = opened.enter_context((folder / shard.file).open("wb"))
            offset = file.write(shard.header())
            for name, entry in shard.tensors.items():
                files[name], at[name] = file, offset
                end[name] = offset = offset + entry.nbytes
        for name, rows in tensors:
            files[name].seek(at[name])
            at[name] += files[name].write(as_bytes(rows.to(dtypes[name])))
            assert at[name] <= end[name], f"{name}: {at[name] - end[name]} bytes too many"
    for name, reached in at.items():
        assert reached == end[name], f"{name}: {end[name] - reached} bytes are missing"
    write_index(folder, shards)


def as_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_weights(
    path: Path, entries: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, ByteRange]:
    """Write tensors to one file, in the order and dtypes of `entries`; return their places."""
    write_shards(path.parent, [Shard(path.name, entries, metadata=False)], tensors)
    return read_places(path)


def read_places(path: Path) -> dict[str, ByteRange]:
    """Return the places of the tensors in a file that `write_weights` wrote."""
    header, _, start = read_header(path)
    spans = {name: tensor["data_offsets"] for name, tensor in header.items()}
    return {name: ByteRange(start + begin, end - begin) for name, (begin, end) in spans.items()}
