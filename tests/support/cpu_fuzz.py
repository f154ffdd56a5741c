"""Damages the operands and attributes of operators' calls at random."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.cpu_host import Arrays, Case

INTEGERS = [0, -1, 1, 2, 3, 5, 31, 32, 33, 64, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 58]
INTEGERS += [1 << 62, (1 << 63) - 1, -(1 << 31), -(1 << 62), -(1 << 63)]
FLOATS = [0.0, -0.0, -1.0, 1e-40, 1e38, -3e38, np.inf, -np.inf, np.nan]
WORDS = ["-", ">", "0", "1", "7", "-1", "99", "99999999999999999", "9" * 30, "N=0", "N=-1", "N"]
WORDS += ["Accept", "Product", "groups=0", "latent=4611686018427387904", "axis=9", "", "\n", "x=y"]
LARGEST = 1 << 18  # bytes of an operand
Random = np.random.Generator


def damaged(cases: Sequence[Case], count: int, seed: int) -> Iterator[Case]:
    """Draw calls whose operands are small, and damage each in one to three places."""
    rng = np.random.default_rng(seed)
    small = [case for case in cases if _bytes(case.operands) < LARGEST]
    by_op = {op: [case for case in small if case.op == op] for op in {c.op for c in small}}
    for i in range(count):
        op = sorted(by_op)[i % len(by_op)]
        drawn = by_op[op][rng.integers(len(by_op[op]))]
        case = Case(op, dict(drawn.attributes), list(drawn.operands), types=drawn.types)
        for _ in range(rng.integers(1, 4)):
            _damage(case, rng)
        yield case


def _bytes(operands: Arrays) -> int:
    return sum(array.nbytes for array in operands if array is not None)


def _damage(case: Case, rng: Random) -> None:
    there = [i for i, array in enumerate(case.operands) if array is not None]
    if case.attributes and rng.random() < 0.25:
        name = list(case.attributes)[rng.integers(len(case.attributes))]
        case.attributes[name] = _attribute(case.attributes[name], rng)
        return
    if not there:
        return
    place = there[rng.integers(len(there))]
    array = case.operands[place]
    assert array is not None
    kind = rng.random()
    if kind < 0.02:
        case.operands[place] = None
    elif kind < 0.1:
        other = there[rng.integers(len(there))]
        case.operands[place], case.operands[other] = case.operands[other], array
    elif kind < 0.15 and array.dtype in (np.int32, np.int64):
        case.operands[place] = array.astype(np.int32 if array.dtype == np.int64 else np.int64)
    elif kind < 0.6:
        case.operands[place] = _shaped(array, rng)
    else:
        case.operands[place] = _filled(array, rng)


def _attribute(value: int | float | str, rng: Random) -> int | float | str:
    if isinstance(value, str):
        return _text(value, rng)
    if isinstance(value, float):
        return float(rng.choice(FLOATS))
    near = [value - 1, value + 1, 2 * value, value // 2]
    drawn = int(rng.choice(np.array([*INTEGERS, *near], dtype=object)))
    return min(max(drawn, -(1 << 63)), (1 << 63) - 1)


def _text(text: str, rng: Random) -> str:
    """Return a chain's steps, or its results, with a word or a line more, less or elsewhere."""
    apart = "\n" if rng.random() < 0.3 else " "
    parts = text.split(apart)
    at, other = rng.integers(len(parts)), rng.integers(len(parts))
    kind = rng.random()
    if kind < 0.4:
        parts[at] = str(rng.choice(WORDS))
    elif kind < 0.6:
        parts[at], parts[other] = parts[other], parts[at]
    elif kind < 0.8:
        parts.insert(at, parts[other])
    else:
        del parts[at]
    return apart.join(parts)


def _shaped(array: NDArray[Any], rng: Random) -> NDArray[Any]:
    """Return the numbers repeated or cut off, in a shape whose sizes are as large as fits."""
    shape, kind = list(array.shape), rng.random()
    if kind < 0.15 and shape:
        del shape[rng.integers(len(shape))]
    elif kind < 0.3:
        shape.insert(int(rng.integers(len(shape) + 1)), int(rng.choice([0, 1, 2, 3])))
    elif kind < 0.4 and shape:  # nothing, but of any sizes
        shape[rng.integers(len(shape))] = 0
        shape[rng.integers(len(shape))] = int(rng.choice([1 << 20, 1 << 31, 1 << 40, 1 << 58]))
        if 0 not in shape:
            shape[0] = 0
    elif shape:
        at = rng.integers(len(shape))
        size = shape[at]
        shape[at] = max(0, int(rng.choice([0, 1, 2, size - 1, size + 1, 2 * size, 32, 33])))
        if rng.random() < 0.2:
            rng.shuffle(shape)
    count = int(np.prod(shape, dtype=object))
    if count * array.itemsize > 4 * LARGEST:
        return array
    try:
        return np.resize(array, shape) if array.size and count else np.zeros(shape, array.dtype)
    except ValueError:  # NumPy has no array of such sizes
        return array


def _filled(array: NDArray[Any], rng: Random) -> NDArray[Any]:
    """Return the numbers with some, or all, replaced by what nobody would write."""
    if not array.size:
        return array
    chosen = rng.random(array.shape) < rng.choice([0.05, 0.5, 1.0])
    if array.dtype == np.float32:
        drawn: NDArray[Any] = rng.choice(np.array(FLOATS, np.float32), array.shape)
    elif array.dtype in (np.int32, np.int64):
        limits = np.iinfo(array.dtype)
        drawn = rng.choice(np.clip(np.array(INTEGERS), limits.min, limits.max), array.shape)
    else:
        drawn = rng.integers(0, 256, (*array.shape, array.itemsize), dtype=np.uint8)
        drawn = (drawn & 1 if array.dtype == np.bool_ else drawn).view(array.dtype)[..., 0]
    return np.where(chosen, drawn, array).astype(array.dtype)
