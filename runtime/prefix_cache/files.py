"""Safetensors files of rows of prompts, with the identity of their engine.

A file has the rows of some tokens of a prompt, or recurrent states after some of them, or both. The
prefixes in an engine's own folder are such files too, and are mapped into memory.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.manifest import COPY_AGAIN, PREFIXES, Manifest
from mtpbuild.runtime.contract.state import CACHED
from mtpbuild.runtime.errors import EngineFileError
from mtpbuild.runtime.files import replace_file
from mtpbuild.runtime.prefix_cache.tree import RowSpan
from mtpbuild.runtime.safetensors_header import (
    encode_header,
    make_header,
    read_header,
    view_tensors,
)

TOKENS = "tokens"  # name of the tensor with the token ids
STATES = "{}@{}"  # name of a tensor: a recurrent state, and how many of the file's rows precede it
NAMES = {"float32": "F32", "bfloat16": "BF16", "int8": "I8", "int64": "I64", "bool": "BOOL"}
PRIVATE = 0o600  # mode of a file for its owner alone, as rows reveal the text of their prompt
Arrays = Mapping[str, NDArray[Any]]
log = logging.getLogger("mtpbuild")


@dataclass(frozen=True)
class PrefixFile:
    """An open file: its metadata, and its tensors, which may be mapped and not read yet."""

    path: Path
    about: dict[str, str]
    tensors: dict[str, NDArray[Any]]
    header: dict[str, Any]  # of the tensors
    data: NDArray[np.uint8]  # all bytes of the tensors

    @property
    def span(self) -> RowSpan:
        tokens = tuple(self.tensors[TOKENS].tolist())
        return RowSpan(self.about["parent"], int(self.about["start"]), tokens, not self.rows)

    @property
    def rows(self) -> Arrays:
        """The rows, by the names of their states."""
        return {n: array for n, array in self.tensors.items() if n != TOKENS and "@" not in n}

    @property
    def states(self) -> dict[int, dict[str, NDArray[Any]]]:
        """The recurrent states, by the number of the file's rows before them."""
        states: dict[int, dict[str, NDArray[Any]]] = {}
        for tensor, array in self.tensors.items():
            name, at, rows = tensor.rpartition("@")
            if at:
                states.setdefault(int(rows), {})[name] = array
        return states

    @property
    def is_whole(self) -> bool:
        """Whether the hash of metadata and tensors is the one that was written."""
        about = {name: value for name, value in self.about.items() if name != "sha256"}
        return _compute_digest(about, self.header, [self.data]) == self.about.get("sha256")

    @cached_property
    def is_usable(self) -> bool:
        """Whether the file is whole; warns once if it is not."""
        if not (whole := self.is_whole):
            log.warning("%s: damaged (sha256), so it is not used; make it anew", self.path)
        return whole


class PrefixFiles:
    """The writer and reader of one engine's prefix files."""

    def __init__(self, manifest: Manifest) -> None:
        self.engine, self.lookahead = identity(manifest), manifest.lookahead
        self._types = {s.name: s.dtype for s in manifest.state}
        self._widths = {s.name: s.sizes["width"] for s in manifest.state if s.role in CACHED}
        self._shapes = {s.name: s.shape[1:] for s in manifest.state if s.role == "recurrent"}

    def write(self, path: Path, span: RowSpan, arrays: Arrays) -> None:
        """Write a file atomically, readable by its owner alone.

        arrays: rows by the names of their states, recurrent states by names as in STATES.
        """
        tensors = {**arrays, TOKENS: np.array(span.tokens, np.int64)}
        held = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
        types = {name: self._types.get(name.partition("@")[0], "int64") for name in held}
        header = make_header(
            (name, NAMES[types[name]], array.shape, array.nbytes) for name, array in held.items()
        )
        about = {"engine": self.engine, "parent": span.parent, "start": str(span.start)}
        sha256 = _compute_digest(about, header, [array.data for array in held.values()])
        with replace_file(path, PRIVATE) as file:
            file.write(encode_header(header, about | {"sha256": sha256}))
            for array in held.values():
                file.write(array.data)

    def open(self, path: Path, *, mapped: bool = True) -> PrefixFile:
        """Map or read a file, which may be another engine's; its hash is not checked.

        Raises ValueError if it was not written by `write`, or does not fit the engine's states.
        """
        try:
            header, about, start = read_header(path)
            # Copy-on-write, as torch warns of arrays that it may not write to.
            data = np.memmap(path, mode="c") if mapped else np.fromfile(path, np.uint8)
            ends = [entry["data_offsets"][1] for entry in header.values()]
            if start + max(ends) != len(data):
                raise ValueError("its size is not the one that it should have")
            body = np.asarray(data[start:])
            text = {str(name): str(value) for name, value in about.items()}
            file = PrefixFile(path, text, view_tensors(header, body), header, body)
            if file.about["engine"] == self.engine:
                self._check(file)
            return file
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"its header is damaged ({type(error).__name__})") from None

    def _check(self, file: PrefixFile) -> None:
        """Raise ValueError if the tensors do not fit the engine's states."""
        count, states = len(file.span.tokens) - self.lookahead, file.states
        shapes = {name: array.shape for name, array in file.rows.items()}
        wanted = {name: (count, width) for name, width in self._widths.items()}
        if shapes != wanted and (shapes or not states):
            raise ValueError("its rows are missing or of another shape")
        for rows, arrays in states.items():
            shapes = {name: array.shape for name, array in arrays.items()}
            if not 0 < rows <= count or shapes != self._shapes:
                raise ValueError("its recurrent states are of another shape")


def identity(manifest: Manifest) -> str:
    """Return a hash of all that rows depend on: the build, and its files without prefixes."""
    hashes = {n: f.sha256 for n, f in manifest.files.items() if not n.startswith(f"{PREFIXES}/")}
    parts = [manifest.build.fingerprint, hashes, [s.model_dump() for s in manifest.state]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _compute_digest(about: dict[str, str], header: dict[str, Any], data: Sequence[Any]) -> str:
    digest = hashlib.sha256(json.dumps([about, header], sort_keys=True).encode())
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def name_prefix_file(name: str) -> str:
    return f"{PREFIXES}/{name}.safetensors"


def list_prefix_names(manifest: Manifest) -> list[str]:
    """Return the names of an engine's prefixes."""
    files = (name for name in manifest.files if name.startswith(f"{PREFIXES}/"))
    return sorted(name.split("/")[1].removesuffix(".safetensors") for name in files)


def open_prefixes(folder: Path, manifest: Manifest) -> Iterator[tuple[str, PrefixFile]]:
    """Yield the name and file of each prefix; hashes are not checked.

    A file that this user may not read is skipped with a warning; EngineFileError for a wrong file.
    """
    files = PrefixFiles(manifest)
    for name in list_prefix_names(manifest):
        path = folder / name_prefix_file(name)
        try:
            file = files.open(path)
        except PermissionError as error:
            log.warning("%s: not used, as it can't be read (%s)", path, error.strerror)
            continue
        except (OSError, ValueError) as error:
            raise EngineFileError(f"{path}: {error}; {COPY_AGAIN}") from None
        if file.about["engine"] != files.engine:
            raise EngineFileError(
                f"{path}: made for another engine, tokenizer or weights: make it anew with "
                f"`mtpbuild prefix remove` and `add`"
            )
        yield name, file


def check_prefixes(folder: Path, manifest: Manifest) -> None:
    """Raise EngineFileError if a prefix has changed or belongs to another engine."""
    for name, file in open_prefixes(folder, manifest):
        if not file.is_whole:
            path = folder / name_prefix_file(name)
            raise EngineFileError(
                f"{path} differs from what the build wrote (sha256); {COPY_AGAIN}"
            )
