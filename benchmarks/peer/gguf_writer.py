"""Writing of GGUF files, with one tensor in memory at a time: a checkpoint's or random ones."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf_keys import PLAIN, Config, architecture, shapes, write_keys

BLOCK = 32  # numbers that share a scale
BLOCKS = {"q4_0": 18, "q8_0": 34}  # bytes of a block
ENDS = ("token_embd.weight", "output.weight")
HALVES = ("attn_k_b.weight", "attn_v_b.weight")

Shape = tuple[int, ...]
Array = npt.NDArray[Any]


def write_file(
    c: Config,
    out: Path,
    wanted: str,
    values: Callable[[str, Shape, str], Array],
    texts: Callable[[gguf.GGUFWriter], None] | None = None,
    *,
    module: bool = False,
) -> dict[str, int]:
    """Write a model in type `wanted`; return the bytes of each tensor.

    values: makes a tensor in its stored form, from its name, shape and type. texts: writes the
    tokenizer; by default the file has token ids alone. module: whether there is an MTP module.
    """
    writer = gguf.GGUFWriter(out, architecture(c))
    write_keys(writer, c, module=module)
    if texts is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        texts(writer)
    wanted_shapes = shapes(c, module=module)
    kinds = {name: find_kind(name, shape, wanted) for name, shape in wanted_shapes.items()}
    sizes = {name: nbytes(shape, kinds[name]) for name, shape in wanted_shapes.items()}
    for name, shape in wanted_shapes.items():
        raw = np.dtype(np.float32 if kinds[name] == "f32" else np.uint8)
        dtype = gguf.GGMLQuantizationType[kinds[name].upper()]
        stored = stored_shape(shape, kinds[name])
        writer.add_tensor_info(name, stored, raw, sizes[name], raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in wanted_shapes.items():
        writer.write_tensor_data(values(name, shape, kinds[name]))
    writer.close()
    return sizes


def find_kind(name: str, shape: Shape, wanted: str) -> str:
    """Return the type of a tensor in a file of type `wanted`."""
    if len(shape) == 1 or any(part in name for part in PLAIN) or wanted == "f32":
        return "f32"
    return "q8_0" if name in ENDS or name.endswith(HALVES) else wanted


def stored_shape(shape: Shape, kind: str) -> Shape:
    """Return the shape of the stored array, of floats or of bytes."""
    if kind == "f32":
        return shape
    count, rest = divmod(shape[-1], BLOCK)
    if rest:
        raise SystemExit(f"{kind}: {shape[-1]} columns do not split into blocks of {BLOCK}")
    return (*shape[:-1], count * BLOCKS[kind])


def nbytes(shape: Shape, kind: str) -> int:
    return prod(stored_shape(shape, kind)) * (4 if kind == "f32" else 1)
