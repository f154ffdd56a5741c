"""matmul_scaled in Triton: the kernel dequantises tiles of the weight in registers."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.launch import Launch, Launches, by_kernels, cdiv
from mtpbuild.plugins.matmul_scaled.op import MAX_TOKENS, dequantise, matmul_scaled
from mtpbuild.plugins.tiles import choose_tiles, count_splits, product_with_weight


@triton.jit
def scaled_product(
    x, values, scales, scales_2,
    rows,
    parts,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BY_INPUT: tl.constexpr,
    WORDS: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, s, j) multiplies block j of the rows by block i of the columns, over split s."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) * BLOCK_N
    share = tl.cdiv(tl.cdiv(DEPTH, splits), BLOCK_K) * BLOCK_K
    start = split * share
    total = product_with_weight(
        x, m, rows, values, scales, scales_2, 0, start, tl.minimum(start + share, DEPTH), first,
        1, DEPTH, WIDTH, BLOCK, BY_INPUT, WORDS, ASSEMBLY, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    n = first + tl.arange(0, BLOCK_N)
    to = parts + (split * rows + m)[:, None] * WIDTH + n[None, :]
    tl.store(to, total, (m < rows)[:, None] & (n < WIDTH)[None, :])


def product_launch(
    x: Tensor, values: Tensor, scales: Tensor | None = None, scales_2: Tensor | None = None
) -> Launch:
    """Return the launch for x [.., K]; the caller sums its output [splits, rows, N] over splits.

    Without scales the weight is unquantised. The order of a row's sums does not depend on the other
    rows.
    """
    rows, K, N = math.prod(x.shape[:-1]), x.shape[-1], values.shape[1]
    constants = {"DEPTH": K, "WIDTH": N, **choose_tiles(x, values, scales, scales_2)}
    columns = cdiv(N, constants["BLOCK_N"])
    splits = count_splits(columns, K, constants)
    constants.pop("PROGRAMS")
    parts = x.new_empty(splits, rows, N, dtype=torch.float32)
    inputs = (x, values, scales, scales_2)
    grid = (columns, splits, cdiv(rows, constants["BLOCK_M"]))
    return Launch(scaled_product, grid, inputs, (rows,), (parts,), constants)


def product_launches(x: Tensor, *weight: Any, dtype: torch.dtype) -> Launches:
    """Return the launch for x [.., K] and a weight, and the sum of its output over the splits."""
    launch = product_launch(x, *weight)
    (parts,) = launch.outputs
    shape = (*x.shape[:-1], weight[0].shape[1])
    return Launches((launch,), parts, axis=0, dtype=dtype, shape=shape)


def matmul_scaled_launches(x: Tensor, *weight: Any) -> Launches:
    """Return the op's launch and the sum over its splits."""
    return product_launches(x, *weight, dtype=x.dtype)


@triton.jit
def sum_of_parts(at, there, apart, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Load PARTS values, each `apart` values after the last, and return their sum as `dtype`."""
    total = tl.load(at, there, 0.0)
    for i in tl.static_range(1, PARTS):
        total += tl.load(at + i * apart, there, 0.0)
    return total.to(dtype)


@by_kernels(matmul_scaled, "matmul_scaled_parts")
def matmul_scaled_parts(x: Tensor, *weight: Any) -> Tensor:
    """Multiply like `few_rows`, but return the partial sums [splits, .., N]."""
    (parts,) = product_launch(x.contiguous(), *weight).run()
    return parts.unflatten(1, x.shape[:-1])


@by_kernels(matmul_scaled)
def few_rows(x: Tensor, *weight: Any) -> Tensor:
    """Multiply with the kernel, for up to `MAX_TOKENS` tokens."""
    return matmul_scaled_launches(x.contiguous(), *weight).run()


def matmul_scaled_triton(x: Tensor, *weight: Any) -> Tensor:
    """Run matmul_scaled on a GPU: by the kernel for a step, else like the reference.

    In a trace the number of slots may be a symbol, but the number of tokens per slot is a symbol
    only for a prompt's chunk.
    """
    tokens = math.prod(x.shape[:-1])
    many = isinstance(tokens, int) and tokens > MAX_TOKENS
    if many or not isinstance(x.shape[-2], int):
        return x @ dequantise(*weight).to(x.dtype)
    return few_rows(x, *weight)
