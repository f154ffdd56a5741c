"""Headers of safetensors files: a length and a JSON text, which precede the tensors.

The `safetensors` package neither returns the offset of a tensor nor writes a header alone.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.files import check_regular

ALIGNMENT = 64  # of the first tensor byte, for memory mapping
MAX_BYTES = 100_000_000  # of a header; the package has the same limit
METADATA = "__metadata__"
Header = dict[str, dict[str, Any]]  # dtype, shape and data_offsets of each tensor
DTYPES = {
    **{"F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32},
    **{"BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "BF16": np.uint16},
}


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> Header:
    """Return the header of consecutive tensors, given as name, dtype, shape and number of bytes."""
    header, end = Header(), 0
    for name, dtype, shape, nbytes in tensors:
        span = [end, end := end + nbytes]
        header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": span}
    return header


def encode_header(header: Header, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a file that precede its tensors."""
    about = {METADATA: metadata} if metadata else {}
    text = json.dumps(about | header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[Header, dict[str, str], int]:
    """Return a file's header, its metadata, and the offset of its tensors.

    Raises OSError, or ValueError if it is no header; entries are not checked.
    """
    check_regular(path)
    with path.open("rb") as file:
        return parse_header(file)


def parse_header(file: BinaryIO) -> tuple[Header, dict[str, str], int]:
    """Do what `read_header` does for a file that is open at its beginning."""
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(length)) if length <= MAX_BYTES else None
    except RecursionError:
        header = None
    if not isinstance(header, dict):
        raise ValueError("its header is damaged")
    return header, header.pop(METADATA, {}), file.tell()


def view_tensors(header: Header, data: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the tensors in the bytes after a header; bfloat16 as its bits, in uint16."""
    tensors = dict[str, NDArray[Any]]()
    for name, entry in header.items():
        values: NDArray[Any] = data[slice(*entry["data_offsets"])].view(DTYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return tensors
