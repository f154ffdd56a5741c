"""The safetensors files of a checkpoint: which ones there must be, and whether they are whole."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpbuild.runtime.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Index:
    """`model.safetensors.index.json`: tensor name -> shard, and the bytes of all tensors."""

    path: Path
    shards: Mapping[str, str]
    total_size: int | None

    def check(self, files: Mapping[str, Path]) -> None:
        """Require every promised tensor where it is promised; files: tensor name -> its file."""
        gone = [n for n, s in self.shards.items() if n not in files or files[n].name != s]
        if gone:
            first, names = min(gone), f"names tensor {min(gone)}{more(len(gone) - 1)}"
            raise CheckpointError(f"{self.path}: {names}, which {self.shards[first]} doesn't hold")


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file, and where its data begins; raises what goes wrong."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        return header, file.tell()


def find_shards(folder: Path) -> tuple[list[Path], Index | None]:
    """`model.safetensors`, or the index's shards; raises CheckpointError unless all are whole."""
    path = folder / INDEX
    index = _read_index(path) if path.is_file() else None
    if index is None and not (folder / SINGLE).is_file():
        raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX}")
    shards = [folder / name for name in _names(path, index)]
    _refuse_incomplete(folder, shards, None if index is None else index.total_size)
    return shards, index


def shard_names(folder: Path) -> list[str]:
    """The files that hold a checkpoint's weights, whether they are there or not."""
    path = folder / INDEX
    return _names(path, _read_index(path) if path.is_file() else None)


def stored_names(folder: Path) -> set[str]:
    """The names of a checkpoint's tensors, as far as index or header tell; torch is not needed."""
    path = folder / INDEX
    if path.is_file():
        return set(_read_index(path).shards)
    try:
        return set(read_header(folder / SINGLE)[0])
    except (OSError, ValueError, MemoryError, OverflowError, TypeError, AttributeError):
        return set()  # not there yet, or whoever reads the tensors says what is wrong


def _names(path: Path, index: Index | None) -> list[str]:
    names = sorted(set(index.shards.values())) if index is not None else [SINGLE]
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{path}: shard {name!r} is not a file name")
    return names


def _read_index(path: Path) -> Index:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        shards = dict(raw["weight_map"].items())
        if not all(isinstance(name, str) for name in shards.values()):
            raise ValueError("a shard's name is not text")
        size = raw.get("metadata", {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: no usable weight_map ({error!r})") from None
    return Index(path, shards, size if isinstance(size, int) else None)


def _refuse_incomplete(folder: Path, shards: list[Path], total_size: int | None) -> None:
    """Name the first shard that is missing or cut short, and count the bytes that are."""
    missing = [path for path in shards if not os.path.isfile(path)]  # never raises: odd names
    there = {path: _measure(path) for path in shards if path not in missing}
    lacking = {path: lack for path, (_, lack) in there.items() if lack > 0}
    faults = [f"shard {path.name} named by {INDEX} is missing" for path in missing]
    faults += [f"{path.name} is {lack:,} bytes short" for path, lack in lacking.items()]
    if not faults:
        return
    gone = sum(lacking.values())
    if missing and total_size is not None:
        gone += max(0, total_size - sum(size for size, _ in there.values()))
    total = f"; {gone:,} bytes lack in all" if gone and (missing or len(faults) > 1) else ""
    raise CheckpointError(
        f"{folder}: {faults[0]}{more(len(faults) - 1)}{total}; resume the download"
    )


def _measure(path: Path) -> tuple[int, int]:
    """Bytes of tensors that the header promises, and by how many the file is too short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        if POINTER.startswith(length) and len(length) == 8:
            raise CheckpointError(f"{path}: a Git LFS pointer, not the weights: run `git lfs pull`")
        header = int.from_bytes(length, "little")
        if header > size:
            return 0, 0  # whoever reads the tensors says what is wrong
        try:
            entries = json.loads(file.read(header))
            tensors = (entry for name, entry in entries.items() if name != "__metadata__")
            data = max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return 0, 0
    return data, 8 + header + data - size


def more(count: int) -> str:
    return f" (and {count} more)" if count else ""
