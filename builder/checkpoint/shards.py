"""Find the safetensors files of a checkpoint, and refuse missing and truncated ones."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mtpbuild.builder.checkpoint.text_model import find_text_name
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.files import read_json
from mtpbuild.runtime.safetensors_header import read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Index:
    """`model.safetensors.index.json`: the shard of each tensor, and the bytes of all tensors."""

    path: Path
    shards: Mapping[str, str]
    total_size: int | None

    def check(self, files: Mapping[str, Path]) -> None:
        """Check that each tensor is in the shard that the index names; files: tensor -> file."""
        wrong = [n for n, s in self.shards.items() if n not in files or files[n].name != s]
        if wrong:
            named, shard = f"tensor {min(wrong)}{more(len(wrong) - 1)}", self.shards[min(wrong)]
            raise CheckpointError(f"{self.path}: names {named}, which {shard} doesn't hold")


def find_shards(folder: Path) -> tuple[list[Path], Index | None]:
    """Return the paths of a checkpoint's weights, and the index if there is one.

    Raises CheckpointError if a file is missing or truncated.
    """
    index = read_index(folder)
    if index is None and not (folder / SINGLE).is_file():
        raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX}")
    shards = [folder / name for name in _read_names(index)]
    _refuse_incomplete(folder, shards, None if index is None else index.total_size)
    return shards, index


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights, and not config.json alone."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def read_shard_names(folder: Path) -> list[str]:
    """Return the names of the files of a checkpoint's weights, even if they are missing."""
    return _read_names(read_index(folder))


def read_stored_names(folder: Path) -> set[str]:
    """Return the names of a text model's tensors from index or header, without torch."""
    if (index := read_index(folder)) is not None:
        found: Iterable[str] = index.shards
    else:
        try:
            found = read_header(folder / SINGLE)[0]
        except (OSError, ValueError):
            return set()  # if it is missing or unreadable, opening the tensors reports it
    return {name for name in map(find_text_name, found) if name is not None}


def _read_names(index: Index | None) -> list[str]:
    if index is None:
        return [SINGLE]
    for name in (names := sorted(set(index.shards.values()))):
        if Path(name).name != name:
            raise CheckpointError(f"{index.path}: shard {name!r} is not a file name")
    return names


def read_index(folder: Path) -> Index | None:
    """Read a folder's index; return None if there is none. Raises CheckpointError."""
    if not (path := folder / INDEX).exists():
        return None
    try:
        raw = read_json(path)
        shards = dict(raw["weight_map"].items())
        if not all(isinstance(name, str) for name in shards.values()):
            raise ValueError("a shard's name is not text")
        size = raw.get("metadata", {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: no usable weight_map ({error!r})") from None
    return Index(path, shards, size if isinstance(size, int) else None)


def _refuse_incomplete(folder: Path, shards: list[Path], total_size: int | None) -> None:
    """Raise CheckpointError if shards are missing or truncated.

    The error names the first such shard and counts all missing bytes.
    """
    missing = [path for path in shards if not os.path.isfile(path)]  # Path.is_file may raise
    measured = {path: _measure(path) for path in shards if path not in missing}
    truncated = {path: short for path, (_, short) in measured.items() if short > 0}
    faults = [f"shard {path.name} named by {INDEX} is missing" for path in missing]
    faults += [f"{path.name} is {short:,} bytes short" for path, short in truncated.items()]
    if not faults:
        return
    lost = sum(truncated.values())
    if missing and total_size is not None:
        lost += max(0, total_size - sum(size for size, _ in measured.values()))
    total = f"; {lost:,} bytes lack in all" if lost and (missing or len(faults) > 1) else ""
    raise CheckpointError(
        f"{folder}: {faults[0]}{more(len(faults) - 1)}{total}; resume the download"
    )


def _measure(path: Path) -> tuple[int, int]:
    """Return a shard's bytes of tensors by its header, and how many of them the file lacks."""
    with path.open("rb") as file:
        first = file.read(8)
    if POINTER.startswith(first) and len(first) == 8:
        raise CheckpointError(f"{path}: a Git LFS pointer, not the weights: run `git lfs pull`")
    try:
        header, _, start = read_header(path)
        data = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return 0, 0  # opening the tensors reports an unreadable header
    return data, start + data - path.stat().st_size


def more(count: int) -> str:
    return f" (and {count} more)" if count else ""
