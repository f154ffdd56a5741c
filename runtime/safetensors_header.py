"""Headers of safetensors files: the length of a JSON text, and the text, before the tensors.

The `safetensors` package neither returns the offset of a tensor nor writes a header alone.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtpbuild.runtime.files import check_regular

ALIGNMENT = 64  # of the first tensor byte, for memory mapping
MOST_BYTES = 100_000_000  # of a header; the package has the same limit
METADATA = "__metadata__"
Header = dict[str, dict[str, Any]]  # dtype, shape and data_offsets of each tensor


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
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if length <= MOST_BYTES else None
        except RecursionError:
            header = None
        if not isinstance(header, dict):
            raise ValueError("its header is damaged")
        return header, header.pop(METADATA, {}), file.tell()
