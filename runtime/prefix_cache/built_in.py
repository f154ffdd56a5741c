"""The prefixes that an engine was built with: files whose rows are mapped."""

import logging
from collections.abc import Iterator
from pathlib import Path

from mtpbuild.runtime.contract.manifest import COPY_AGAIN, PREFIXES, Manifest
from mtpbuild.runtime.errors import EngineFileError
from mtpbuild.runtime.prefix_cache.files import PrefixFile, PrefixFiles

log = logging.getLogger("mtpbuild")


def prefix_file(name: str) -> str:
    return f"{PREFIXES}/{name}.safetensors"


def prefix_names(manifest: Manifest) -> list[str]:
    """Return the names of an engine's prefixes."""
    files = (name for name in manifest.files if name.startswith(f"{PREFIXES}/"))
    return sorted(name.split("/")[1].removesuffix(".safetensors") for name in files)


def open_prefixes(folder: Path, manifest: Manifest) -> Iterator[tuple[str, PrefixFile]]:
    """Yield each prefix and its file, whose hash is not checked; raise EngineFileError.

    A file that this user may not read is skipped with a warning.
    """
    files = PrefixFiles(manifest)
    for name in prefix_names(manifest):
        path = folder / prefix_file(name)
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
            raise EngineFileError(f"{folder / prefix_file(name)}: bytes changed; {COPY_AGAIN}")
