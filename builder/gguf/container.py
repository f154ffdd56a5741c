"""The container: the keys of a GGUF file, and where its tensors lie."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtpbuild.builder.checks import needs
from mtpbuild.runtime.errors import CheckpointError

MAGIC = b"GGUF"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
READ = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K"),
    *("Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
Keys = Mapping[str, Any]
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
        """Return the bytes of a row."""
        return self.shape[-1] // self.block * self.size

    def read(self, expert: int | None = None) -> Bytes:
        """Read the blocks [rows, blocks, bytes] of the tensor, or of one of a stack's experts."""
        rows, first = prod(self.shape[:-1]), 0
        if expert is not None:
            rows //= self.shape[0]
            first = expert * rows
        count, start = rows * self.row, self.offset + first * self.row
        try:
            found = np.fromfile(self.file, np.uint8, count, offset=start)
        except OSError as error:
            raise CheckpointError(f"{self.file}: can't read {self.name} ({error})") from None
        if found.size != count:
            raise CheckpointError(f"{self.file}: ends within {self.name}; resume the download")
        return found.reshape(rows, -1, self.size)

    def decode(self, blocks: Bytes) -> Floats:
        """Dequantise blocks [rows, blocks, bytes] to fp32 [rows, elements]."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        data = np.ascontiguousarray(blocks).reshape(len(blocks), -1)
        if self.type in ("F32", "F16"):
            data = data.view({"F32": "<f4", "F16": "<f2"}[self.type])
        return dequantize(data, GGMLQuantizationType[self.type]).astype(np.float32, copy=False)

    def shifted(self, blocks: Bytes) -> dict[str, npt.NDArray[Any]]:
        """Split blocks [rows, blocks, bytes] of Q4_1 or Q4_K into the parts of `BlockMinima`."""
        from gguf.quants import Q4_K

        halves = np.ascontiguousarray(blocks[..., :4]).view("<f2").astype(np.float32)
        scales, minima = halves[..., :1], halves[..., 1:]
        if self.type == "Q4_1":  # a byte has elements j and j + 16 of its block
            codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
        else:  # elements j and j + 32 of 64
            factors = Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
            sizes = (each.reshape(*blocks.shape[:2], 8).astype(np.float32) for each in factors)
            scales, minima = (a * b for a, b in zip((scales, -minima), sizes, strict=True))
            pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
            codes = np.concatenate([pairs & 15, pairs >> 4], axis=-2)
        rows, codes = len(blocks), codes.reshape(len(blocks), -1, 32)
        return {
            "": codes[..., 0::2] | codes[..., 1::2] << 4,
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
        return str(self.keys.get("general.architecture"))

    def key(self, name: str, default: Any = None) -> Any:
        """Return a key of the architecture; raise CheckpointError if it is missing."""
        found = self.keys.get(f"{self.architecture}.{name}", default)
        if found is None:
            raise CheckpointError(f"{self.path}: no key {self.architecture}.{name}")
        return found

    def tensor(self, name: str) -> RawTensor:
        """Return a tensor; raise CheckpointError if it is missing."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: missing tensor {name}")
        return self.tensors[name]

    @property
    def modules(self) -> int:
        """Count the MTP modules by the keys, whether their tensors are there or not."""
        return int(self.key("nextn_predict_layers", 0))

    @property
    def layers(self) -> int:
        """Count the trunk's layers; MTP modules are blocks after them."""
        return int(self.key("block_count")) - self.modules


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
        keys, found = _read_header(shard, stat.st_size, stat.st_mtime_ns)
        first = keys if first is None else first
        if twice := tensors.keys() & found.keys():
            raise CheckpointError(f"{shard}: tensor {min(twice)} is in another shard, too")
        tensors |= found
    assert first is not None
    return GgufFile(path, first, tensors)


def find_header_end(path: Path) -> int | None:
    """Return where a file's header ends; None if it can't be read, as it may lack bytes."""
    with needs("build", "gguf"):
        from gguf import GGUFReader
    try:
        return int(GGUFReader(path).data_offset)
    except Exception:  # whatever zeros in place of a header lead to
        return None


@lru_cache(maxsize=4)  # a build reads the header of a file several times
def _read_header(path: Path, size: int, changed: int) -> tuple[Keys, Mapping[str, RawTensor]]:
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file: it does not begin with GGUF")
            if file.read(4).startswith(b"\0\0"):  # of the version, the lowest byte first
                raise CheckpointError(f"{path}: big-endian; convert it with gguf-convert-endian")
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from None
    with needs("build", "gguf"):
        from gguf import GGML_QUANT_SIZES, GGUFReader
    try:
        reader = GGUFReader(path)
        keys = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        why = str(error).partition("\n")[0]
        if "GGMLQuantizationType" in why:
            kind = why.partition(" ")[0]
            raise CheckpointError(f"{path}: {refuse_type(f'number {kind}')}") from None
        raise CheckpointError(
            f"{path}: cut off or damaged, so not a readable GGUF file ({why}); resume the download"
        ) from None
    tensors = dict[str, RawTensor]()
    for each in reader.tensors:
        kind, shape = each.tensor_type, tuple(int(n) for n in reversed(each.shape))
        if kind.name not in READ:
            raise CheckpointError(f"{path}: {each.name}: {refuse_type(kind.name)}")
        block, nbytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise CheckpointError(
                f"{path}: {each.name}: rows of {shape[-1]} are no whole blocks of {kind.name}"
            )
        place = int(each.data_offset)
        tensors[each.name] = RawTensor(path, each.name, kind.name, shape, block, nbytes, place)
    return keys, tensors


def refuse_type(kind: str) -> str:
    return f"type {kind} is not read; supported: {', '.join(READ)}"
