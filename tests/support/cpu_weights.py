"""Random weights as the CPU's kernels read them, and what their definition makes of rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtpbuild.plugins.cpu.layout import (
    pack_floats,
    pack_pairs,
    pack_scales,
    pack_values,
    reorder_gates,
    with_offsets,
)
from tests.support import exact
from tests.support.exact import Floats

FLOATS = "float32"
INTEGERS = ("int4", "int8")
FP4 = "mxfp4"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
KINDS = (FLOATS, *INTEGERS, FP4)
OFFSET_KINDS = tuple(f"{kind} {offsets}" for kind in INTEGERS for offsets in ("zeros", "minima"))


@dataclass(frozen=True)
class Stored:
    """An integer weight [.., N, K] as checkpoints store it."""

    bits: int
    values: torch.Tensor
    scales: torch.Tensor  # fp16, or joined with zeros or minima; exponents of powers of two
    integers: NDArray[Any]  # [.., N, K / 32, 32]; e2m1's numbers are no integers
    factors: NDArray[Any]
    minima: NDArray[np.float16] | None = None

    def multiply(self, x: Floats, *at: int) -> Floats:
        """Multiply rows by the weight, or by one of a stack."""
        minima = None if self.minima is None else self.minima[at]
        return exact.product(x, self.integers[at], self.factors[at], minima)


@dataclass(frozen=True)
class Packed:
    """A weight's operands, and the product [M, N] of rows with it, or with one of a stack."""

    values: NDArray[Any]
    scales: NDArray[Any] | None
    multiply: Callable[..., Floats]


def random_weight(
    rng: np.random.Generator, shape: tuple[int, ...], bits: int
) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int32]]:
    """Values and scales of a weight [.., N, K] as checkpoints store them, and its integers."""
    *outer, K = shape
    codes = rng.integers(0, 1 << bits, (*outer, K // 32, 32))
    scales = (0.01 * rng.standard_normal((*outer, K // 32))).astype(np.float16)
    zero = 1 << bits - 1
    return store(codes, bits), torch.from_numpy(scales), (codes - zero).astype(np.int32)


def store(codes: NDArray[Any], bits: int) -> torch.Tensor:
    """Return codes as bytes; two codes of 4 bits share one."""
    stored: NDArray[Any] = codes.astype(np.uint8)
    if bits == 4:
        stored = stored[..., 0::2] | stored[..., 1::2] << 4
    return torch.from_numpy(stored)


def draw_stored(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Stored:
    if kind == FP4:
        *outer, K = shape
        codes = rng.integers(0, 16, (*outer, K // 32, 32))
        exponents = rng.integers(110, 124, (*outer, K // 32))
        return store_fp4(codes, exponents)
    bits = int(kind[3])
    values, scales, integers = random_weight(rng, shape, bits)
    half = 1 << bits - 1
    factors = scales.numpy()
    if kind.endswith("zeros"):
        zeros = rng.integers(-half, half, scales.shape).astype(np.int8)
        zeros.flat[:2] = -half, half - 1
        both = with_offsets(scales, torch.from_numpy(zeros))
        return Stored(bits, values, both, integers - zeros[..., None].astype(np.int32), factors)
    if kind.endswith("minima"):
        minima = (0.1 * rng.standard_normal(scales.shape)).astype(np.float16)
        both = with_offsets(scales, torch.from_numpy(minima))
        return Stored(bits, values, both, integers + half, factors, minima)
    return Stored(bits, values, scales, integers, factors)


def store_fp4(codes: NDArray[Any], exponents: NDArray[Any]) -> Stored:
    """Return codes [.., N, K / 32, 32] of e2m1 with an exponent for each block."""
    scales = torch.from_numpy(exponents.astype(np.uint8))[..., None]
    factors = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return Stored(4, store(codes, 4), scales, E2M1[codes], factors)


def draw_packed(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Packed:
    """Draw a weight with these outer dimensions, outputs and inputs."""
    if kind == FLOATS:
        *outer, outputs, inputs = shape
        plain = rng.standard_normal((*outer, inputs, outputs), np.float32)
        values = pack_floats(torch.from_numpy(plain)).numpy()
        return Packed(values, None, lambda x, *at: exact.float_product(x, plain[at]))
    stored = draw_stored(rng, kind, shape)
    packed = pack_values(stored.values).numpy(), pack_scales(stored.scales).numpy()
    return Packed(*packed, stored.multiply)


def draw_experts(
    rng: np.random.Generator, kind: str, X: int, E: int, inner: int
) -> tuple[dict[str, NDArray[Any] | None], Callable[[int, Floats], Floats]]:
    """Draw the weights of X experts, and return what an expert makes of rows [M, E]."""
    down = draw_packed(rng, kind, (X, E, inner))
    if kind == FLOATS:
        plain = rng.standard_normal((X, E, 2 * inner), np.float32)
        pairs = pack_pairs(torch.from_numpy(plain))
        both: tuple[Any, Any] = (pack_floats(pairs).numpy(), None)
    else:
        stored = draw_stored(rng, kind, (X, 2 * inner, E))  # a gate, its up, the next gate
        both = (
            pack_values(reorder_gates(stored.values)).numpy(),
            pack_scales(reorder_gates(stored.scales)).numpy(),
        )

    def run_expert(e: int, x: Floats) -> Floats:
        if kind == FLOATS:
            gate, up = np.split(exact.float_product(x, plain[e]), 2, axis=-1)
        else:
            h = stored.multiply(x, e)
            gate, up = h[:, ::2], h[:, 1::2]
        return down.multiply(exact.gated(gate, up), e)

    operands = {"both": both[0], "both_scales": both[1]}
    return operands | {"down": down.values, "down_scales": down.scales}, run_expert
