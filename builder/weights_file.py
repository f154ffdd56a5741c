"""weights.safetensors of an engine, written tensor by tensor: the model is never in memory."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

WEIGHTS = "weights.safetensors"
ALIGNMENT = 64  # of the first byte of data, for memory mapping
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}


@dataclass(frozen=True)
class Placed:
    """Where a tensor's bytes lie in the file."""

    offset: int
    size: int


def write_weights(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, Placed]:
    """Stream tensors, in the order of `shapes`, into one safetensors file.

    A tensor may come as several of the same name, which are its rows in turn.
    dtypes: what tensors become in the file, if not fp32.
    """
    kinds = {name: (dtypes or {}).get(name, torch.float32) for name in shapes}
    header, places, end = {}, {}, 0
    for name, shape in shapes.items():
        size = kinds[name].itemsize * prod(shape)
        dtype, span = NAMES[kinds[name]], (end, end + size)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        places[name] = (end, size)
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        named = groupby(tensors, itemgetter(0))
        for (name, shape), (given, pieces) in zip(shapes.items(), named, strict=True):
            assert name == given, f"{given} comes where {name} should"
            rows = 0
            for _, piece in pieces:
                assert piece.shape[1:] == shape[1:], f"{name}: {piece.shape} of {shape}"
                rows += len(piece)
                _write(file, piece.to(kinds[name]))
            assert rows == shape[0], f"{name}: {rows} rows of {shape}"
    return {name: Placed(start + begin, size) for name, (begin, size) in places.items()}


def _write(file: IO[bytes], tensor: Tensor) -> None:
    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def read_places(path: Path) -> dict[str, Placed]:
    """Where the tensors of a file that `write_weights` wrote lie."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
    spans = {name: tensor["data_offsets"] for name, tensor in header.items()}
    return {name: Placed(start + begin, end - begin) for name, (begin, end) in spans.items()}
