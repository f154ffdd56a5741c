"""The prefixes that an engine was built with: their files are mapped and stay in the pool."""

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from mtpbuild.runtime.contract.manifest import COPY_AGAIN, PREFIXES, Manifest, hash_file
from mtpbuild.runtime.contract.programs import Pooling, Programs
from mtpbuild.runtime.errors import EngineFileError
from mtpbuild.runtime.prefix_files import RowsFile, identity, open_rows
from mtpbuild.runtime.prefix_pool import PrefixPool, make_pool

STATES = "{}@{}"  # the name of a recurrent state after a number of rows
log = logging.getLogger("mtpbuild")


def prefix_file(name: str) -> str:
    return f"{PREFIXES}/{name}.safetensors"


def prefix_names(manifest: Manifest) -> list[str]:
    """Return the names of an engine's prefixes."""
    files = (name for name in manifest.files if name.startswith(f"{PREFIXES}/"))
    return sorted(name.split("/")[1].removesuffix(".safetensors") for name in files)


def open_prefixes(folder: Path, manifest: Manifest) -> Iterator[tuple[str, RowsFile]]:
    """Yield each prefix and its file after a check of the header; raise EngineFileError.

    A file that this user may not read is skipped with a warning.
    """
    own = identity(manifest)
    for name in prefix_names(manifest):
        path = folder / prefix_file(name)
        try:
            file = open_rows(path)
            _check(file, manifest)
        except PermissionError as error:
            log.warning("%s: not used, as it can't be read (%s)", path, error.strerror)
            continue
        except (OSError, ValueError) as error:
            raise EngineFileError(f"{path}: {error}; {COPY_AGAIN}") from None
        if file.about.get("engine") != own:
            raise EngineFileError(
                f"{path}: made for another engine, tokenizer or weights: make it anew with "
                f"`mtpbuild prefix remove` and `add`"
            )
        yield name, file


def check_prefixes(folder: Path, manifest: Manifest) -> None:
    """Raise EngineFileError if a prefix has changed or belongs to another engine."""
    for name, _ in open_prefixes(folder, manifest):
        if not _is_whole(folder, manifest, name):
            raise EngineFileError(f"{folder / prefix_file(name)}: bytes changed; {COPY_AGAIN}")


def open_pool(
    programs: Programs,
    manifest: Manifest,
    folder: Path,
    limit: int | None,
    kept: str | Path | None = None,
) -> PrefixPool | None:
    """Return a pool of `limit` bytes with an engine's prefixes and those kept in a folder.

    limit: None for a share of the free memory. Returns None if the limit is 0 and there are neither
    prefixes nor a folder.
    """
    if limit == 0 and kept is None and not prefix_names(manifest):
        return None
    pool = make_pool(programs, manifest, limit, kept)
    try:
        if pool is not None:
            attach_prefixes(cast(Pooling, programs), manifest, folder, pool)
        if pool is not None and kept is not None:
            pool.restore()
    except BaseException:
        if pool is not None:
            pool.close()  # another process may use its folder
        raise
    return pool


def attach_prefixes(keeping: Pooling, manifest: Manifest, folder: Path, pool: PrefixPool) -> None:
    """Add an engine's prefixes to a pool."""
    for name, file in open_prefixes(folder, manifest):
        numbers = dict[int, int]()
        for rows, arrays in states_of(file, manifest).items():
            numbers[rows] = pool.number()
            keeping.adopt(numbers[rows], arrays)
        number = pool.number()
        own = {s.name: file.tensors[s.name] for s in manifest.state if s.role == "rows"}
        keeping.adopt(number, own)
        count = len(file.tokens) - pool.lookahead
        pool.pin(file.tokens, count, number, numbers, _ready(folder, manifest, name))


def states_of(file: RowsFile, manifest: Manifest) -> dict[int, dict[str, NDArray[Any]]]:
    """Return the recurrent states in a file, by the number of rows before them."""
    names = [s.name for s in manifest.state if s.role == "recurrent"]
    found: dict[int, dict[str, NDArray[Any]]] = {}
    for tensor, array in file.tensors.items():
        name, _, rows = tensor.rpartition("@")
        if name in names and rows.isdecimal():
            found.setdefault(int(rows), {})[name] = array
    return found


def _check(file: RowsFile, manifest: Manifest) -> None:
    """Raise ValueError if the tensors do not fit the engine's states."""
    count = len(file.tokens) - manifest.lookahead
    for spec in manifest.state:
        wanted = (count, spec.sizes["width"]) if spec.role == "rows" else None
        if wanted and (spec.name not in file.tensors or file.tensors[spec.name].shape != wanted):
            raise ValueError(f"rows of {spec.name} are missing or of another shape")
    for rows, states in states_of(file, manifest).items():
        shapes = {s.name: s.shape[1:] for s in manifest.state if s.role == "recurrent"}
        if not 0 < rows <= count or {n: a.shape for n, a in states.items()} != shapes:
            raise ValueError("its recurrent states are of another shape")


def _ready(folder: Path, manifest: Manifest, name: str) -> Callable[[], bool]:
    """Return a function that checks a file's hash on its first call and warns if it is wrong."""

    @cache
    def ready() -> bool:
        whole = _is_whole(folder, manifest, name)
        if not whole:
            path = folder / prefix_file(name)
            log.warning("%s: damaged (sha256), so it is not used; make it anew", path)
        return whole

    return ready


def _is_whole(folder: Path, manifest: Manifest, name: str) -> bool:
    file = prefix_file(name)
    try:
        return hash_file(folder / file) == manifest.files[file].sha256
    except OSError:
        return False
