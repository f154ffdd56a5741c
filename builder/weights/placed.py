"""Write safetensors files tensor by tensor, and find where each tensor lies in them."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE
from mtpbuild.builder.engine import layout
from mtpbuild.builder.weights.formats import Entry, entry_of
from mtpbuild.builder.weights.formats.integers import coarse_blocks, coarse_note
from mtpbuild.builder.weights.made import Share, made
from mtpbuild.runtime.contract.manifest import WEIGHTS, hash_file
from mtpbuild.runtime.safetensors_header import encode_header, make_header, read_header

if TYPE_CHECKING:
    from mtpbuild.builder.opened_model import OpenedModel

logger = logging.getLogger(__name__)
SHARD_LIMIT = 5 * 10**9  # bytes of tensors in a file


@dataclass(frozen=True)
class Placed:
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
        """Return the bytes before the file's data, which has the order of `tensors`."""
        tensors = ((n, e.dtype, e.shape, e.nbytes) for n, e in self.tensors.items())
        return encode_header(make_header(tensors), {"format": "pt"} if self.metadata else None)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())


def split(tensors: Mapping[str, Entry], limit: int = SHARD_LIMIT) -> list[Shard]:
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
            place = file.write(shard.header())
            for name, entry in shard.tensors.items():
                files[name], at[name] = file, place
                end[name] = place = place + entry.nbytes
        for name, rows in tensors:
            files[name].seek(at[name])
            at[name] += files[name].write(raw(rows.to(dtypes[name])))
            assert at[name] <= end[name], f"{name}: {at[name] - end[name]} bytes too many"
    for name, reached in at.items():
        assert reached == end[name], f"{name}: {end[name] - reached} bytes are missing"
    write_index(folder, shards)


def raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_weights(
    path: Path, entries: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, Placed]:
    """Write tensors to one file, in the order and dtypes of `entries`; return their places."""
    write_shards(path.parent, [Shard(path.name, entries, metadata=False)], tensors)
    return read_places(path)


def read_places(path: Path) -> dict[str, Placed]:
    """Return the places of the tensors in a file that `write_weights` wrote."""
    header, _, start = read_header(path)
    spans = {name: tensor["data_offsets"] for name, tensor in header.items()}
    return {name: Placed(start + begin, end - begin) for name, (begin, end) in spans.items()}


@dataclass(frozen=True)
class WrittenWeights:
    """The weights file of one rank: the places of its tensors, and its hash."""

    places: dict[str, Placed]
    sha256: str


@dataclass
class EngineWeights:
    """The weights files of a model's ranks, written once for all engines of a build."""

    model: "OpenedModel"
    watch: Callable[[str], None] = lambda stage: None
    written: dict[int, WrittenWeights] = field(default_factory=dict)  # by rank

    def write(
        self, folder: Path, siblings: Path | None, rank: int = 0, there: str | None = None
    ) -> WrittenWeights:
        """Write folder/weights.safetensors, or link it to the same file of an engine in `siblings`.

        there: the file's sha256 if an interrupted build has already written it.
        """
        path, ranks = folder / WEIGHTS, self.model.ranks
        inner = folder.name if ranks.tp > 1 else ""

        def shared(sha256: str) -> bool:
            return siblings is not None and layout.share_file(path, sha256, siblings, inner)

        done = self.written.get(rank)
        if there is not None:
            done = WrittenWeights(read_places(path), there)
        elif done is None or not shared(done.sha256):
            table = self.model.table.of_rank(rank)
            parameters = dict(self.model.model.named_parameters())
            entries = {name: entry_of(parameters[name]) for w in table for name in w.tensors}
            tensors = made(self.model.checkpoint, table, Share(ranks, rank))
            tensors = self._told(tensors, sum(prod(each.shape) for each in entries.values()))
            done = WrittenWeights(write_weights(path, entries, tensors), hash_file(path))
            shared(done.sha256)
        self.written[rank] = done
        return done

    def _told(
        self, tensors: Iterable[tuple[str, Tensor]], total: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Report progress as tensors pass, then log how many blocks have lost accuracy."""
        done = coarse = 0
        for name, tensor in tensors:
            yield name, tensor
            done += tensor.numel()
            coarse += coarse_blocks(tensor)
            self.watch(f"write weights, {done / total:.0%}")
        if coarse:
            logger.warning("note: %s", coarse_note(coarse))
