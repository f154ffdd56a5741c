"""weights.safetensors of an engine: written tensor by tensor, found by place."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mtpbuild.builder.checkpoint.write import Shard, write_shards
from mtpbuild.builder.quantize.formats import Part

WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Placed:
    """A tensor's bytes in the file."""

    offset: int
    size: int


def write_weights(
    path: Path, parts: Mapping[str, Part], tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, Placed]:
    """Stream tensors, in the order of `parts` and in their dtypes, into one file."""
    write_shards(path.parent, [Shard(path.name, parts, metadata=False)], tensors)
    return read_places(path)


def read_places(path: Path) -> dict[str, Placed]:
    """Find the tensors of a file that `write_weights` wrote."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
    spans = {name: tensor["data_offsets"] for name, tensor in header.items()}
    return {name: Placed(start + begin, end - begin) for name, (begin, end) in spans.items()}
