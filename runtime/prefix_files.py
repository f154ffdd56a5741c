"""Safetensors files of rows of prompts, with the identity of their engine."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.manifest import PREFIXES, Manifest
from mtpbuild.runtime.contract.programs import host_type
from mtpbuild.runtime.safetensors_header import encode_header, make_header, read_header

TOKENS = "tokens"  # name of the tensor with the token ids
NAMES = {"float32": "F32", "bfloat16": "BF16", "int64": "I64", "bool": "BOOL"}
DTYPES = {name: host_type(dtype) for dtype, name in NAMES.items()}
PRIVATE = 0o600  # mode of a file for its owner alone, as rows reveal the text of their prompt
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RowsFile:
    """An open file: its metadata, and its tensors, which may be mapped and not read yet."""

    path: Path
    about: dict[str, str]
    tensors: dict[str, NDArray[Any]]
    header: dict[str, Any]  # of the tensors
    data: NDArray[np.uint8]  # all bytes of the tensors

    @property
    def tokens(self) -> list[int]:
        ids: list[int] = self.tensors[TOKENS].tolist()
        return ids


def identity(manifest: Manifest) -> str:
    """Return a hash of all that rows depend on: the build and the files except prefixes."""
    own = {n: f.sha256 for n, f in manifest.files.items() if not n.startswith(f"{PREFIXES}/")}
    said = [manifest.build.fingerprint, own, [s.model_dump() for s in manifest.state]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_rows(
    path: Path, tensors: Arrays, types: Mapping[str, str], about: dict[str, str]
) -> None:
    """Write a file atomically, readable by its owner alone.

    types: the dtypes of tensors as a manifest names them. bfloat16 is held as uint16 bits.
    """
    arrays = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    header = make_header(
        (name, NAMES[types.get(name, "int64")], array.shape, array.nbytes)
        for name, array in arrays.items()
    )
    sha256 = _digest(about, header, [array.data for array in arrays.values()])
    half = path.with_name(f".{path.name}.half")
    half.unlink(missing_ok=True)
    with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
        file.write(encode_header(header, about | {"sha256": sha256}))
        for array in arrays.values():
            file.write(array.data)
    half.replace(path)


def open_rows(path: Path, *, whole: bool = False) -> RowsFile:
    """Map a file, or read it whole; raise ValueError if `write_rows` cannot have written it."""
    try:
        header, about, start = read_header(path)
        data = np.fromfile(path, np.uint8) if whole else np.memmap(path, mode="r")
        ends = [entry["data_offsets"][1] for entry in header.values()]
        if start + max(ends) != len(data):
            raise ValueError("its size is not the one that it should have")
        body = np.asarray(data[start:])
        tensors = {
            name: body[slice(*entry["data_offsets"])].view(DTYPES[entry["dtype"]])
            for name, entry in header.items()
        }
        shaped = {name: array.reshape(header[name]["shape"]) for name, array in tensors.items()}
        return RowsFile(path, {str(k): str(v) for k, v in about.items()}, shaped, header, body)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__})") from None


def is_whole(file: RowsFile) -> bool:
    """Tell whether the hash of metadata and tensors is the one that was written."""
    about = {name: value for name, value in file.about.items() if name != "sha256"}
    return _digest(about, file.header, [file.data]) == file.about.get("sha256")


def _digest(about: dict[str, str], header: dict[str, Any], data: Sequence[Any]) -> str:
    digest = hashlib.sha256(json.dumps([about, header], sort_keys=True).encode())
    for each in data:
        digest.update(each)
    return digest.hexdigest()
