"""Weights of an engine in memory: mapped from their file, or copied to huge pages."""

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mtpbuild.runtime.contract.manifest import COPY_AGAIN
from mtpbuild.runtime.errors import EngineFileError, take_first_line
from mtpbuild.runtime.files import check_regular
from mtpbuild.runtime.safetensors_header import read_header, view_tensors

HUGE_PAGES = 1 << 22  # bytes from which memory asks for huge pages, as NumPy does


def map_tensors(path: Path, huge_pages: bool = False) -> dict[str, NDArray[Any]]:
    """Map the tensors of a safetensors file; bfloat16 is returned as its bits, in uint16.

    Only used pages are read. huge_pages: copy the whole file instead. Raises EngineFileError if the
    file does not fit its header.
    """
    try:
        check_regular(path)
        with safe_open(path, "np"):
            pass  # opening checks that the tensors fill the file, without gaps
        header, _, start = read_header(path)
        data = _copy_file(path) if huge_pages else np.memmap(path, mode="r")
        return view_tensors(header, data[start:])
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise EngineFileError(
            f"{path}: not readable ({take_first_line(error)}); {COPY_AGAIN}"
        ) from None


def _copy_file(path: Path) -> NDArray[np.uint8]:
    memory = allocate(path.stat().st_size)
    with path.open("rb", buffering=0) as file, memoryview(memory) as left:
        while left and (count := file.readinto(left)):
            left = left[count:]
    return np.frombuffer(memory, np.uint8)


def allocate(size: int) -> mmap.mmap:
    """Return private memory of zeros, which asks for huge pages if it is large."""
    private = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    memory = mmap.mmap(-1, size, **private)
    if size >= HUGE_PAGES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
