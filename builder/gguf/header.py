"""The header of a GGUF file: its keys, and what its tensors are called and where they begin.

Counts are checked against the bytes that are left before anything is made of them. The package
`gguf` makes an array of every value, which takes a vocabulary 100 times its bytes.
"""

import mmap
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.safetensors_header import MAX_BYTES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
TEXT, ARRAY = 8, 9
ALIGNMENT = 32  # of tensors, unless a key says otherwise
MAX_ELEMENTS = 1 << 22  # of an array; vocabularies have fewer tokens and merges
MAX_AXES, MAX_NAME = 4, 256
Keys = Mapping[str, Any]  # numbers, texts, lists of texts, and memoryviews of numbers


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a header; its shape is NumPy's, its offset counts from the first tensor."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class Header:
    """A header, and where the tensors begin that follow it."""

    keys: Keys
    tensors: list[TensorInfo]
    end: int


class HeaderBytes:
    """The bytes of a header, which are read one value after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at, self._end = data, len(MAGIC), min(len(data), MAX_BYTES)

    def take(self, count: int) -> bytes:
        if count > self._end - self.at:
            raise ValueError(f"{count:,} bytes are announced, {self._end - self.at:,} are left")
        self.at += count
        return self._data[self.at - count : self.at]

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        """Read numbers of these kinds, which are letters of `struct`."""
        return struct.unpack(f"<{kinds}", self.take(struct.calcsize(f"<{kinds}")))

    def text(self) -> str:
        return self.take(*self.numbers("Q")).decode()

    def name(self) -> str:
        """Read the name of a key or a tensor, which messages may show."""
        name = self.text()
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ValueError(f"a name is {name[:20]!a}")
        return name

    def value(self) -> Any:
        """Read a value after its kind."""
        (kind,) = self.numbers("I")
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            return self.numbers(_find_letter(kind))[0]
        kind, count = self.numbers("IQ")
        if count > MAX_ELEMENTS:
            raise ValueError(f"an array of {count:,} elements")
        if kind == TEXT:
            return [self.text() for _ in range(count)]
        letter: Any = _find_letter(kind)
        return memoryview(self.take(count * struct.calcsize(letter))).cast(letter)

    def tensor(self) -> TensorInfo:
        name, (axes,) = self.name(), self.numbers("I")
        if not 0 < axes <= MAX_AXES:
            raise ValueError(f"{name} has {axes:,} dimensions")
        shape = self.numbers(axes * "Q")[::-1]
        if 0 in shape:
            raise ValueError(f"{name} has shape {[*shape]}")
        return TensorInfo(name, shape, *self.numbers("IQ"))


def _find_letter(kind: int) -> str:
    """Return the letter of `struct` for numbers of this kind; arrays are not nested."""
    if kind not in NUMBERS:
        raise ValueError(f"a value of kind {kind}")
    return NUMBERS[kind]


def parse_header(path: Path) -> Header:
    """Read a file's header; raise CheckpointError if it is damaged or of another kind."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file: it does not begin with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, HeaderBytes(data))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(
            f"{path}: cut off or damaged, so not a readable GGUF file ({error}); resume the "
            "download"
        ) from None


def _parse(path: Path, header: HeaderBytes) -> Header:
    (version,) = header.numbers("I")
    if version.to_bytes(4, "big")[:1] != b"\0":
        raise CheckpointError(
            f"{path}: a big-endian file is not read: `gguf-convert-endian FILE little` converts it"
        )
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: version {version} of GGUF is not read; supported: 2, 3")
    count, more = header.numbers("QQ")
    keys = dict[str, Any]()
    for _ in range(more):
        if (name := header.name()) in keys:
            raise ValueError(f"key {name} is there twice")
        keys[name] = header.value()
    tensors = [header.tensor() for _ in range(count)]
    alignment = keys.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_BYTES:
        raise ValueError(f"general.alignment is {reprlib.repr(alignment)}")
    return Header(keys, tensors, -(-header.at // alignment) * alignment)
