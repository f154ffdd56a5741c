"""Runs operators of the CPU's library outside onnxruntime, by cpu_host.cpp: on another processor,
which qemu plays, or under sanitizers.
"""

import os
import pickle
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECORD = "RECORDED_CPU_CASES"  # names the file that `recorded` writes to
TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10}
NAMES = {number: name for name, number in TYPES.items()}
Arrays = list[NDArray[Any] | None]
Outcome = Arrays | str  # results, or an error


@dataclass
class Case:
    """An operator's call. outcome: what onnxruntime said, if it was asked; types: its results'."""

    op: str
    attributes: dict[str, int | float | str]
    operands: Arrays
    outcome: Outcome = field(default_factory=list)
    types: list[str] = field(default_factory=list)  # where the operator leaves them to the graph

    def key(self) -> bytes:
        return _written(self)


def record(
    op: str,
    attributes: Mapping[str, Any],
    operands: Iterable[NDArray[Any] | None],
    outcome: Outcome,
) -> None:
    """Append a call to the file that the environment names, if it does."""
    if path := os.environ.get(RECORD):
        with open(path, "ab") as file:
            pickle.dump(Case(op, dict(attributes), list(operands), outcome), file)


def recorded(path: Path) -> list[Case]:
    """Each call once."""
    cases: dict[bytes, Case] = {}
    with path.open("rb") as file:
        while file.peek(1):
            case = pickle.load(file)
            cases.setdefault(case.key(), case)
    return list(cases.values())


def _text(text: str) -> bytes:
    return struct.pack("<q", len(text.encode())) + text.encode()


def _attribute(value: int | float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<q", 2) + _text(value)
    return (
        struct.pack("<qf", 1, value) if isinstance(value, float) else struct.pack("<qq", 0, value)
    )


def _written(case: Case) -> bytes:
    parts = [_text(case.op), struct.pack("<q", len(case.attributes))]
    for name, value in case.attributes.items():
        parts += [_text(name), _attribute(value)]
    parts.append(struct.pack("<q", len(case.operands)))
    for array in case.operands:
        if array is None:
            parts.append(struct.pack("<q", 0))
            continue
        parts.append(
            struct.pack(f"<{2 + array.ndim}q", TYPES[str(array.dtype)], array.ndim, *array.shape)
        )
        parts.append(np.ascontiguousarray(array).tobytes())
    parts.append(
        struct.pack(
            f"<{1 + len(case.types)}q", len(case.types), *(TYPES[name] for name in case.types)
        )
    )
    return b"".join(parts)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def bytes(self, count: int) -> bytes:
        self._at += count
        assert self._at <= len(self._data)
        return self._data[self._at - count : self._at]

    def number(self) -> int:
        return int.from_bytes(self.bytes(8), "little", signed=True)

    def outcome(self) -> Outcome:
        if (count := self.number()) < 0:
            return self.bytes(self.number()).decode()
        return [self._array() for _ in range(count)]

    def _array(self) -> NDArray[Any] | None:
        if not (number := self.number()):
            return None
        dtype = np.dtype(NAMES[number])
        shape = [self.number() for _ in range(self.number())]
        data = self.bytes(int(np.prod(shape, dtype=object)) * dtype.itemsize)
        try:
            return np.frombuffer(data, dtype).reshape(shape)
        except ValueError:  # no numbers, but of sizes that NumPy has no array for
            return np.zeros(0, dtype)


class DiedError(AssertionError):
    """The host did not come to its end: at which case, and what it said."""


def replay(command: Sequence[str | Path], cases: Sequence[Case], isa: str = "") -> list[Outcome]:
    """Run the host's command on these cases."""
    done = subprocess.run(
        [*command],
        input=b"".join(map(_written, cases)) + _text(""),
        capture_output=True,
        env=os.environ | {"MTPBUILD_CPU_ISA": isa},
    )
    if done.returncode != 0:
        output = done.stderr.decode(errors="replace")
        at = max(0, output.count("case ") - 1)
        raise DiedError(
            f"exit code {done.returncode}, {cases[at]}:\n{output[output.rfind('case ') :][:3000]}"
        )
    reader = _Reader(done.stdout)
    return [reader.outcome() for _ in cases]


def differences(
    cases: Sequence[Case], one: Sequence[Outcome], other: Sequence[Outcome]
) -> list[Case]:
    """Return the cases whose outcomes are not the same to the bit."""
    return [case for case, a, b in zip(cases, one, other, strict=True) if not _same(a, b)]


def _same(one: Outcome, other: Outcome) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return [*map(_bits, one)] == [*map(_bits, other)]


def _bits(array: NDArray[Any] | None) -> tuple[tuple[int, ...], bytes] | None:
    """Processors have signs of their own for what is no number: it counts as one value."""
    if array is None:
        return None
    if array.dtype == np.float32:
        array = np.where(np.isnan(array), np.float32(np.nan), array)
    return array.shape, array.tobytes()
