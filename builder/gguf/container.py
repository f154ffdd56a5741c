"""The container: the keys of a GGUF file, and where its tensors lie."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtpbuild.builder.checkpoint.config import COUNT_LIMIT, SIZE_LIMIT
from mtpbuild.builder.gguf.header import Keys, parse_header
from mtpbuild.runtime.errors import CheckpointError, explain_missing_package

IN_LAYER = re.compile(r"blk\.\d+\.")
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
READ = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K"),
    *("Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
DRAFT_IDS = "d2t"
EXPERT_IDS = "ffn_gate_tid2eid.weight"  # in a layer: experts by token
# Tensors that have ids, not weights, and their types.
IDS = {
    DRAFT_IDS: "I64",
    **dict.fromkeys(("masked_embd_ordering", "mtp_token_ordering.weight", EXPERT_IDS), "I32"),
}
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RawTensor:
    """A tensor of a GGUF file; its shape is NumPy's, so the last axis is stored in blocks."""

    file: Path
    name: str
    type: str  # ggml's name
    shape: tuple[int, ...]
    block: int  # elements of a block
    size: int  # bytes of a block
    offset: int  # in the file

    @property
    def row(self) -> int:
        """The bytes of a row."""
        return self.shape[-1] // self.block * self.size

    def read(self, expert: int | None = None) -> Bytes:
        """Read the blocks [rows, blocks, bytes] of the tensor, or of one of a stack's experts."""
        rows, first = prod(self.shape[:-1]), 0
        if expert is not None:
            rows //= self.shape[0]
            first = expert * rows
        count, start = rows * self.row, self.offset + first * self.row
        try:
            blocks = np.fromfile(self.file, np.uint8, count, offset=start)
        except OSError as error:
            raise CheckpointError(f"{self.file}: can't read {self.name} ({error})") from None
        if blocks.size != count:
            raise CheckpointError(f"{self.file}: ends within {self.name}; resume the download")
        return blocks.reshape(rows, -1, self.size)

    def decode(self, blocks: Bytes) -> Floats:
        """Dequantise blocks [rows, blocks, bytes] to fp32 [rows, elements]."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        data = np.ascontiguousarray(blocks).reshape(len(blocks), -1)
        if self.type == "I32":
            return data.view("<i4").astype(np.float32)
        if self.type in ("F32", "F16"):
            data = data.view({"F32": "<f4", "F16": "<f2"}[self.type])
        return dequantize(data, GGMLQuantizationType[self.type]).astype(np.float32, copy=False)

    def split(self, blocks: Bytes) -> dict[str, npt.NDArray[Any]]:
        """Split blocks [rows, blocks, bytes] into the parts of our integers or of `BlockMinima`.

        Those of Q8_0 and Q4_0 begin with a scale, those of Q4_1 and Q4_K with a minimum after it,
        those of MXFP4 with an exponent.
        """
        from gguf.quants import Q4_K

        start = 1 if self.type == "MXFP4" else 2 if self.type.endswith("_0") else 4
        halves = np.ascontiguousarray(blocks[..., : start & ~1]).view("<f2")
        if self.type == "Q8_0":
            return {"": blocks[..., 2:] ^ 0x80, "_scale": halves[..., 0]}  # q + 128, unsigned
        scales, minima = halves[..., :1].astype(np.float32), halves[..., 1:].astype(np.float32)
        if self.type == "Q4_K":  # a byte has elements j and j + 32 of 64
            factors = Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
            sizes = (each.reshape(*blocks.shape[:2], 8).astype(np.float32) for each in factors)
            scales, minima = (a * b for a, b in zip((scales, -minima), sizes, strict=True))
            pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
            codes = np.concatenate([pairs & 15, pairs >> 4], axis=-2)
        else:  # elements j and j + 16 of its block
            codes = np.concatenate([blocks[..., start:] & 15, blocks[..., start:] >> 4], axis=-1)
        rows, codes = len(blocks), codes.reshape(len(blocks), -1, 32)
        values = codes[..., 0::2] | codes[..., 1::2] << 4  # ours has neighbours, the even one first
        if self.type == "Q4_0":
            return {"": values, "_scale": halves[..., 0]}
        if self.type == "MXFP4":
            return {"": values, "_scale": blocks[..., :1]}
        return {
            "": values,
            "_scale": scales.reshape(rows, -1),
            "_minimum": minima.reshape(rows, -1),
        }


@dataclass(frozen=True)
class GgufFile:
    """The keys and tensors of a GGUF file with all its shards."""

    path: Path
    keys: Keys
    tensors: Mapping[str, RawTensor]

    @property
    def architecture(self) -> str:
        return ascii(str(self.keys.get("general.architecture"))[:99])[1:-1]

    @property
    def tokenizer(self) -> str:
        """The name of the way in which texts are split into words, else of the tokenizer's kind."""
        kind = self.keys.get("tokenizer.ggml.model")
        return str(self.keys.get("tokenizer.ggml.pre", kind))

    def key(self, name: str, default: Any = None, kind: type | None = None) -> Any:
        """Return a key of the architecture; raise CheckpointError if it is missing or unusable.

        kind: the default's type unless given; a key without a default is a positive integer.
        """
        kind = kind or (int if default is None else type(default))
        value = self.keys.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"{self.path}: no key {self.architecture}.{name}")
        if isinstance(value, memoryview) and kind is list:
            value = value[:COUNT_LIMIT].tolist()
        least = 0 if default is not None else 1
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or (kind is int and not least <= value <= SIZE_LIMIT):
            what = f"an integer of {least}..{SIZE_LIMIT}" if kind is int else f"a {kind.__name__}"
            raise CheckpointError(
                f"{self.path}: key {self.architecture}.{name} must be {what}, not "
                f"{reprlib.repr(value)}"
            )
        return value

    def texts(self, name: str) -> list[str] | None:
        """Return a list of texts; raise CheckpointError if the key has anything else."""
        value = self.keys.get(name)
        if value is not None and not isinstance(value, list):
            raise CheckpointError(f"{self.path}: key {name} is no list of texts")
        return value

    def tensor(self, name: str) -> RawTensor:
        """Return a tensor; raise CheckpointError if it is missing."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: missing tensor {name}")
        return self.tensors[name]

    @property
    def modules(self) -> int:
        """Count the MTP modules by the keys, whether their tensors are there or not."""
        modules: int = self.key("nextn_predict_layers", 0)
        return modules

    @property
    def layers(self) -> int:
        """Count the trunk's layers; MTP modules are blocks after them."""
        count: int = self.key("block_count") - self.modules
        if not 0 < count <= COUNT_LIMIT or self.modules > COUNT_LIMIT:
            raise CheckpointError(
                f"{self.path}: {count} layers and {self.modules} MTP modules, by its keys "
                "block_count and nextn_predict_layers"
            )
        return count


def find_own_path(path: Path) -> Path:
    """Return the user's own file, not the link to it; what hubs link to has no such name."""
    while path.is_symlink() and (target := path.parent / path.readlink()).suffix == path.suffix:
        path = target
    return path.parent.resolve() / path.name


def find_shard_paths(path: Path) -> list[Path]:
    """Return the paths of all shards of a GGUF file, given one; raise if one is missing."""
    match = SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    paths = [path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := [shard.name for shard in paths if not shard.is_file()]:
        raise CheckpointError(
            f"{path.parent}: shard {missing[0]} is missing; resume the download"
            + (f" ({len(missing)} are)" if len(missing) > 1 else "")
        )
    return paths


def read_file(path: Path) -> GgufFile:
    """Read keys and the places of tensors, of all shards; raise CheckpointError."""
    tensors, first = dict[str, RawTensor](), None
    path = find_own_path(path)
    for shard in find_shard_paths(path):
        stat = shard.stat()
        keys, listed = _read_header(shard, stat.st_size, stat.st_mtime_ns)
        first = keys if first is None else first
        if twice := tensors.keys() & listed.keys():
            raise CheckpointError(f"{shard}: tensor {min(twice)} is in another shard, too")
        tensors |= listed
    assert first is not None
    return GgufFile(path, first, tensors)


def find_header_end(path: Path) -> int | None:
    """Return where a file's header ends; None if it can't be read, as it may lack bytes."""
    try:
        return parse_header(path).end
    except CheckpointError:  # whatever zeros in place of a header lead to
        return None


@lru_cache(maxsize=4)  # a build reads the header of a file several times
def _read_header(path: Path, size: int, changed: int) -> tuple[Keys, Mapping[str, RawTensor]]:
    header = parse_header(path)
    with explain_missing_package("a GGUF file", "build", "gguf"):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    kinds = {kind.value: kind for kind in GGMLQuantizationType}
    tensors = dict[str, RawTensor]()
    for info in header.tensors:
        if info.name in tensors:
            raise CheckpointError(f"{path}: tensor {info.name} is there twice")
        kind = kinds.get(info.type)
        ids = IDS.get(IN_LAYER.sub("", info.name))
        wanted = READ if ids is None else (ids,)
        if kind is None or kind.name not in wanted:
            named = f"number {info.type}" if kind is None else kind.name
            raise CheckpointError(
                f"{path}: {info.name}: type {named} is not read; supported: {', '.join(READ)}"
            )
        block, nbytes = GGML_QUANT_SIZES[kind]
        if info.shape[-1] % block:
            raise CheckpointError(
                f"{path}: {info.name}: rows of {info.shape[-1]} are no whole blocks of {kind.name}"
            )
        place = header.end + info.offset
        if place + prod(info.shape) // block * nbytes > size:
            raise CheckpointError(
                f"{path}: cut off or damaged: it ends within {info.name}; resume the download"
            )
        tensors[info.name] = RawTensor(path, info.name, kind.name, info.shape, block, nbytes, place)
    return header.keys, tensors
