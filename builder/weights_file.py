"""weights.safetensors of an engine, written tensor by tensor: the model is never in memory."""

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

WEIGHTS = "weights.safetensors"
ALIGNMENT = 64  # of the first byte of data, for memory mapping


@dataclass(frozen=True)
class Placed:
    """Where a tensor's bytes lie in the file."""

    offset: int
    size: int


def write_weights(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    packed: Container[str] = (),
) -> dict[str, Placed]:
    """Stream tensors, in the order of `shapes`, into one safetensors file.

    They are fp32, but those in `packed` are uint8.
    """
    header, places, end = {}, {}, 0
    for name, shape in shapes.items():
        dtype, size = ("U8", 1) if name in packed else ("F32", 4)
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        places[name] = (end, size)
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
            assert name == given, f"{given} comes where {name} should"
            assert tuple(tensor.shape) == tuple(shape), f"{name}: {tuple(tensor.shape)} != {shape}"
            file.write(tensor.numpy().data)
    return {name: Placed(start + begin, size) for name, (begin, size) in places.items()}
