"""Computes instructions: functions of NumPy arrays in the types that the instructions name."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16}
IGNORED = {"rn", "ftz", "lo", "approx", "full", "sync"}  # don't change the result


def numpy_type(name: str) -> Any:
    """Return the NumPy type of a PTX type; pairs of values, such as bf16x2, are words."""
    if name == "pred":
        return np.bool_
    if name.endswith("x2"):
        known = {"e2m1x2": np.uint8, "e4m3x2": np.uint16, "f32x2": np.uint64}
        return known.get(name, np.uint32)
    if name == "tf32":
        return np.uint32
    if name in FLOATS:
        return FLOATS[name]
    return np.dtype(f"{'i' if name[0] == 's' else 'u'}{int(name[1:]) // 8}").type


def unsigned(value: Array) -> Array:
    """Return the same bits as unsigned integers, as PTX's registers hold them."""
    return value if value.dtype == np.bool_ else value.view(f"u{value.dtype.itemsize}")


def halves(words: Array, kind: Any) -> tuple[Array, Array]:
    """Return the low and the high half of words of 32 bits."""
    low, high = ((words >> by & 0xFFFF).astype(np.uint16).view(kind) for by in (0, 16))
    return low, high


def joined(low: Array, high: Array) -> Array:
    wide = (unsigned(half).astype(np.uint32) for half in (low, high))
    return next(wide) | next(wide) << np.uint32(16)


def wider(kind: Any) -> Any:
    return np.dtype(f"{np.dtype(kind).kind}{2 * np.dtype(kind).itemsize}").type


def high_product(a: Array, b: Array) -> Array:
    wide = wider(a.dtype)
    return (a.astype(wide) * b.astype(wide) >> 8 * a.dtype.itemsize).astype(a.dtype)


def chosen(a: Array, b: Array, first: Array) -> Array:
    return np.where(first, a, b)


def wide_product(a: Array, b: Array, *more: Array) -> Array:
    wide = wider(a.dtype)
    return ARITHMETIC["add"](a.astype(wide) * b.astype(wide), *(more or (wide(0),)))


def quotient(a: Array, b: Array) -> Array:
    """Divides; integers are rounded towards zero."""
    if a.dtype.kind == "f":
        return a / b
    assert b.all(), "a division by zero"
    return (np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)).astype(a.dtype)


def shifted(a: Array, by: Array, left: bool) -> Array:
    """Shifts; by the width or more, nothing is left, or only the sign."""
    bits = 8 * a.dtype.itemsize
    by = np.minimum(by, bits)
    near = np.minimum(by, bits - 1).astype(a.dtype)
    result = a << near if left else a >> near
    return (
        result
        if a.dtype.kind == "i" and not left
        else np.where(by == bits, a.dtype.type(0), result)
    )


def fused(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c with one rounding: float64 holds the product, and mostly the sum."""
    return (a.astype(np.float64) * b + c).astype(a.dtype)


def fused_halves(a: Array, b: Array, c: Array) -> Array:
    one, two, three = (halves(x, ml_dtypes.bfloat16) for x in (a, b, c))
    each = (
        (one[i].astype(np.float64) * two[i].astype(np.float64) + three[i].astype(np.float64))
        .astype(np.float32)
        .astype(ml_dtypes.bfloat16)
        for i in range(2)
    )
    return joined(*each)


def by_pairs(function: Callable[..., Array]) -> Callable[..., Array]:
    """Make a function work on pairs of fp32, which are words of 64 bits."""

    def both(*given: Array) -> Array:
        pairs = (np.ascontiguousarray(each).view(np.float32) for each in given)
        return function(*pairs).view(np.uint64)

    return both


def bits_of(a: Array, begin: Array, length: Array) -> Array:
    """Compute bfe; in signed numbers the highest extracted bit is the sign."""
    left = (8 * a.dtype.itemsize - begin - length).astype(a.dtype)
    return (a << left) >> (left + begin.astype(a.dtype))


def permuted(a: Array, b: Array, selector: Array) -> Array:
    both, result = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros_like(a)
    for i in range(4):
        which = selector >> np.uint32(4 * i) & np.uint32(0xF)
        byte = (both >> (which & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32)
        byte &= np.uint32(0xFF)
        sign = np.where(byte >= 0x80, np.uint32(0xFF), np.uint32(0))
        result |= np.where(which > 7, sign, byte) << np.uint32(8 * i)
    return result


COMPARED: dict[str, Callable[[Array, Array], Array]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge,
}  # fmt: skip
OPPOSITE = {"ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt", "neu": "eq"}  # true for NaN too


def compared(how: str, a: Array, b: Array) -> Array:
    if how in ("num", "nan"):
        unordered = np.isnan(a) | np.isnan(b)
        return unordered if how == "nan" else ~unordered
    if how in OPPOSITE:
        return ~COMPARED[OPPOSITE[how]](a, b)
    if how == "equ" or (how == "ne" and a.dtype.kind == "f"):
        apart = (a < b) | (a > b)
        return apart if how == "ne" else ~apart
    return COMPARED[how](a, b)


ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def numbers_of_codes(kind: str, to: str, codes: Array, *scales: Array) -> list[Array]:
    """Return the low and high number, times powers of two with biased exponents `scales`."""
    of, bits = (ml_dtypes.float8_e4m3fn, 8) if kind == "e4m3x2" else (ml_dtypes.float4_e2m1fn, 4)
    made = []
    for i in range(2):
        code = (codes >> bits * i & (1 << bits) - 1).astype(np.uint8)
        number = code.view(of).astype(np.float32)
        for each in scales:
            number = np.ldexp(number, (each >> 8 * i & 0xFF).astype(np.int32) - 127)
        made.append(number.astype(FLOATS[to]))
    return made


def converted(how: str, to: str, kind: str, a: Array, *more: Array) -> Array:
    if kind in ("e2m1x2", "e4m3x2"):
        return joined(*numbers_of_codes(kind, to.removesuffix("x2"), a, *more))
    if to == "bf16x2":  # the high half comes first
        return joined(*(x.astype(ml_dtypes.bfloat16) for x in (more[0], a)))
    if to == "tf32":  # to the nearest, ties away from zero
        bits: Array = a.view(np.uint32) + np.uint32(0x1000) & np.uint32(0xFFFFE000)
        return bits
    if a.dtype.kind == "f" and numpy_type(to)(0).dtype.kind in "iu":
        a = ROUNDED[how](a)
    return a.astype(numpy_type(to))


ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mad": lambda a, b, c: a * b + c,
    "fma": fused, "div": quotient, "rem": lambda a, b: a - quotient(a, b) * b, "min": np.minimum,
    "max": np.maximum, "neg": operator.neg, "abs": np.abs, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "not": operator.invert,
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32), "bfe": bits_of, "prmt": permuted,
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a),
    "rcp": lambda a: 1 / a, "tanh": np.tanh, "cvta": lambda a: a, "mov": lambda a: a,
}  # fmt: skip


def function_of(name: tuple[str, ...]) -> tuple[list[Any], Callable[..., Array]]:
    """Return the types of an instruction's operands, and the function of them that it computes.

    Raises KeyError for an unknown instruction.
    """
    verb, *how = name[0], *(part for part in name[1:] if part not in IGNORED)
    kind = numpy_type(how[-1])
    if verb == "setp":
        return [kind] * 2, lambda a, b: compared(how[0], a, b)
    if verb == "selp":
        return [kind, kind, np.bool_], chosen
    if verb == "cvt":
        return [kind] * 2, lambda *given: converted(how[0], how[-2], how[-1], *given)
    if verb in ("shl", "shr"):
        return [kind, np.uint32], lambda a, by: shifted(a, by, verb == "shl")
    if verb == "bfe":
        return [kind, np.uint32, np.uint32], bits_of
    if verb == "fma" and how[-1] == "bf16x2":
        return [kind] * 3, fused_halves
    if how[0] == "f32" and kind is not np.float32:  # the last operand and the result are wider
        narrow: list[Any] = [kind] * (2 if verb == "fma" else 1)
        return [*narrow, np.float32], lambda *x: ARITHMETIC[verb](*(y.astype("f4") for y in x))
    if how[-1] == "f32x2":
        return [kind] * 3, by_pairs(ARITHMETIC[verb])
    if verb in ("min", "max") and kind is np.float32:  # two or three operands; a NaN gives way
        extreme = np.fmin if verb == "min" else np.fmax
        return [kind] * 3, lambda *given: functools.reduce(extreme, given)
    if how[0] == "hi":
        return [kind] * 2, high_product
    if how[0] == "wide":
        return [kind, kind, wider(kind)], wide_product
    return [kind] * 3, ARITHMETIC[verb]
