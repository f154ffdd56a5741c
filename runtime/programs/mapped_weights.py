"""Memory-mapped weights of an engine: only used pages are read, and nothing is copied."""

import os
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mtpbuild.runtime.contract.manifest import COPY_AGAIN
from mtpbuild.runtime.errors import EngineFileError
from mtpbuild.runtime.files import check_regular
from mtpbuild.runtime.safetensors_header import read_header, view_tensors


def mapped(path: Path) -> dict[str, NDArray[Any]]:
    """Map the tensors of a safetensors file; bfloat16 is returned as its bits, in uint16.

    Raises EngineFileError if the file does not fit its header.
    """
    try:
        check_regular(path)
        with safe_open(path, "np"):
            pass  # opening checks that the tensors fill the file, without gaps
        header, _, start = read_header(path)
        return view_tensors(header, np.memmap(path, mode="r")[start:])
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise EngineFileError(f"{path}: not readable ({why}); {COPY_AGAIN}") from None


def fetch_ahead(path: Path) -> None:
    """Ask the system, if it has posix_fadvise, to read a file before it is used."""
    if not hasattr(os, "posix_fadvise"):
        return

    def ask() -> None:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    Thread(target=ask, name="mtpbuild weights", daemon=True).start()
