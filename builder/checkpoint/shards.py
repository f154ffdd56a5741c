"""Find the safetensors files of a checkpoint, and refuse missing and truncated ones."""

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mtpbuild.builder.checkpoint.readable import read_text_config
from mtpbuild.builder.checkpoint.text_model import MODULES, Renames, find_text_name
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.files import read_json
from mtpbuild.runtime.safetensors_header import read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD_NAME = re.compile(r"(^|\.)(mtp|mtp_layers|eh_proj|enorm|hnorm|shared_head)\.")
POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Index:
    """`model.safetensors.index.json`: the shard of each tensor."""

    path: Path
    shards: Mapping[str, str]


def find_shards(folder: Path) -> list[Path]:
    """Return the paths of a checkpoint's weights; raise if a file is missing or truncated.

    A file that is missing and holds nothing but MTP modules is left out: the trunk needs none.
    """
    index = read_index(folder)
    if index is None and not (folder / SINGLE).is_file():
        raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX}")
    heads = set() if index is None else _list_head_files(folder, index)
    names = _read_names(index)
    shards = [folder / name for name in names if name not in heads or (folder / name).exists()]
    _refuse_incomplete(folder, shards)
    return shards


def _list_head_files(folder: Path, index: Index) -> set[str]:
    """Return the files that hold nothing but MTP modules, by index and config.json."""
    count = read_text_config(folder).get("num_hidden_layers")

    def is_head(name: str) -> bool:
        name = find_text_name(name) or ""
        layer = re.match(r"model\.layers\.(\d{1,9})\.", name)
        later = layer is not None and isinstance(count, int) and int(layer[1]) >= count
        return later or name.startswith((MODULES, "model.mtp_layers."))

    return {*index.shards.values()} - {s for n, s in index.shards.items() if not is_head(n)}


def offer_unnamed_head(folder: Path) -> str:
    """Return the end of a message about a missing head, if one lies beside the weights.

    It is a file with MTP modules that the index does not name.
    """
    with suppress(CheckpointError, OSError, ValueError):  # opening the checkpoint reports it
        names = {*read_shard_names(folder)}
        for path in sorted(folder.glob("*.safetensors")):
            if path.name not in names and any(map(HEAD_NAME.search, read_header(path)[0])):
                return f"; {path.name}, which lies beside, has one: --mtp {path}"
    return ""


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights, and not config.json alone."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def read_shard_names(folder: Path) -> list[str]:
    """Return the names of the files of a checkpoint's weights, even if they are missing."""
    return _read_names(read_index(folder))


def read_stored_names(folder: Path, renames: Renames) -> set[str]:
    """Return the names of a text model's tensors from index or header, without torch."""
    if (index := read_index(folder)) is not None:
        names: Iterable[str] = index.shards
    else:
        try:
            names = read_header(folder / SINGLE)[0]
        except (OSError, ValueError):
            return set()  # if it is missing or unreadable, opening the tensors reports it
    ours = (find_text_name(name, renames) for name in names)
    return {name for name in ours if name is not None}


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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: no usable weight_map ({error!r})") from None
    return Index(path, shards)


def _refuse_incomplete(folder: Path, shards: list[Path]) -> None:
    """Raise CheckpointError if shards are missing or truncated; it names the first of them."""
    missing = [path for path in shards if not os.path.isfile(path)]  # Path.is_file may raise
    lacking = {path: _count_lacking(path) for path in shards if path not in missing}
    faults = [f"shard {path.name} named by {INDEX} is missing" for path in missing]
    faults += [f"{path.name} is {short:,} bytes short" for path, short in lacking.items() if short]
    if faults:
        raise CheckpointError(f"{folder}: {faults[0]}{more(len(faults) - 1)}; resume the download")


def _count_lacking(path: Path) -> int:
    """Return how many of a shard's bytes of tensors, by its header, the file lacks."""
    with path.open("rb") as file:
        first = file.read(8)
    if POINTER.startswith(first) and len(first) == 8:
        raise CheckpointError(f"{path}: a Git LFS pointer, not the weights: run `git lfs pull`")
    try:
        header, _, start = read_header(path)
        data = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return 0  # opening the tensors reports an unreadable header
    return max(0, start + data - path.stat().st_size)


def more(count: int) -> str:
    return f" (and {count} more)" if count else ""
