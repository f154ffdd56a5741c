"""Where weights lie: safetensors files, written tensor by tensor, and an engine's file of them."""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE, read_header
from mtpbuild.builder.engine import layout
from mtpbuild.builder.weights.formats import TYPES, Entry, entry_of
from mtpbuild.builder.weights.made import Share, made
from mtpbuild.runtime.contract.manifest import WEIGHTS, hash_file

if TYPE_CHECKING:
    from mtpbuild.builder.opened_model import OpenedModel

SHARD_LIMIT = 5 * 10**9  # bytes of tensors
ALIGNMENT = 64  # of the first byte of data, for memory mapping


@dataclass(frozen=True)
class Placed:
    """A tensor's bytes in its file."""

    offset: int
    size: int


@dataclass(frozen=True)
class Shard:
    """One file; `metadata` as Hugging Face's libraries look for it."""

    file: str
    tensors: Mapping[str, Entry]
    metadata: bool = True

    def header(self) -> bytes:
        """Length and JSON of a safetensors file; data follows in the order of `tensors`."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}} if self.metadata else {}
        end = 0
        for name, entry in self.tensors.items():
            span = (end, end := end + entry.nbytes)
            entries[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": span}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())


def split(tensors: Mapping[str, Entry], limit: int = SHARD_LIMIT) -> list[Shard]:
    """One file if it all fits the limit, else as many as it takes, named as Hugging Face does."""
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
    cursors = dict[str, Cursor]()
    with ExitStack() as files:
        for shard in shards:
            file = files.enter_context((folder / shard.file).open("wb"))
            at = file.write(shard.header())
            for name, entry in shard.tensors.items():
                cursors[name] = Cursor(file, TYPES[entry.dtype], at, at := at + entry.nbytes)
        for name, rows in tensors:
            cursors[name].write(rows)
    for name, cursor in cursors.items():
        assert cursor.at == cursor.end, f"{name}: {cursor.end - cursor.at} bytes are missing"
    write_index(folder, shards)


@dataclass
class Cursor:
    """The bytes of a tensor in an open file; those before `at` are written."""

    file: BinaryIO
    dtype: torch.dtype
    at: int
    end: int

    def write(self, rows: Tensor) -> None:
        """Append the tensor's next rows."""
        if self.file.tell() != self.at:
            self.file.seek(self.at)
        self.at += self.file.write(raw(rows.to(self.dtype)))
        assert self.at <= self.end, f"{self.at - self.end} bytes too many"


def raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_weights(
    path: Path, entries: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, Placed]:
    """Stream tensors, in the order of `entries` and in their dtypes, into one file."""
    write_shards(path.parent, [Shard(path.name, entries, metadata=False)], tensors)
    return read_places(path)


def read_places(path: Path) -> dict[str, Placed]:
    """Find the tensors of a file that `write_weights` wrote."""
    header, start = read_header(path)
    spans = {name: tensor["data_offsets"] for name, tensor in header.items()}
    return {name: Placed(start + begin, end - begin) for name, (begin, end) in spans.items()}


@dataclass(frozen=True)
class WrittenWeights:
    places: dict[str, Placed]
    sha256: str


@dataclass
class EngineWeights:
    """Writes the weights of a model's ranks, once for all engines of a build."""

    model: "OpenedModel"
    written: dict[int, WrittenWeights] = field(default_factory=dict)  # by rank

    def write(
        self, folder: Path, siblings: Path | None, rank: int = 0, there: str | None = None
    ) -> WrittenWeights:
        """Write folder/weights.safetensors; a hard link if an engine in `siblings` has the same.

        there: the file's sha256, if an interrupted build has finished it.
        """
        path, ranks = folder / WEIGHTS, self.model.ranks
        inner = folder.name if ranks.tp > 1 else ""

        def shared(sha256: str) -> bool:
            return siblings is not None and layout.share_file(path, sha256, siblings, inner)

        done = self.written.get(rank)
        if there is not None:
            done = WrittenWeights(read_places(path), there)
        elif done is None or not shared(done.sha256):
            table = self.model.weight_table(rank)
            parameters = dict(self.model.model.named_parameters())
            entries = {name: entry_of(parameters[name]) for w in table for name in w.tensors}
            tensors = made(self.model.checkpoint, table, Share(ranks, rank))
            done = WrittenWeights(write_weights(path, entries, tensors), hash_file(path))
            shared(done.sha256)
        self.written[rank] = done
        return done
