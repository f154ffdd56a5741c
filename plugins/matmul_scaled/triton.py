"""matmul_scaled in Triton: tiles of the weight are dequantised in registers, then multiplied."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.launch import Launch, by_kernels, cdiv, tile
from mtpbuild.plugins.matmul_scaled.op import dequantise, matmul_scaled

MAX_TOKENS = 64  # more of them pay for a weight that is dequantised in memory
PROGRAMS = 2 * 132  # enough for every multiprocessor of an H100
SPLIT_INPUTS = 512  # a split of fewer inputs costs more than it saves
BLOCK_N, BLOCK_K = 64, 64
OPEN_BLOCK = 32  # rows of a program where their number is open


@triton.jit
def float_of(codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Make fp32 of e4m3 or e2m1 codes by their bits: sm_80 has neither type."""
    bits: tl.constexpr = EXPONENT + MANTISSA
    bias: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    codes = codes.to(tl.int32)
    size = (codes << (23 - MANTISSA)) & (((1 << bits) - 1) << (23 - MANTISSA))
    sign = (codes << (31 - bits)) & -2147483648
    # A subnormal code makes a subnormal number here: the product is exact for both.
    return (size | sign).to(tl.float32, bitcast=True) * 2.0 ** (127 - bias)


@triton.jit
def scaled_tile(
    values, scales, scales_2, expert, begin, k, n, deep, right,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BY_INPUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load rows k (from `begin` on) and columns n of a weight [DEPTH, WIDTH] as fp32; others are 0.

    `expert` picks one weight of a stack. BLOCK inputs share a scale. BY_INPUT says that scales_2
    are per inputs too.
    """
    there = deep[:, None] & right[None, :]
    if scales_2 is None:
        of = values + (expert * DEPTH + k)[:, None] * WIDTH + n[None, :]
        value = float_of(tl.load(of, there, 0), 4, 3)
        if BLOCK % BLOCK_K == 0:
            of_all = scales + (expert * (DEPTH // BLOCK) + begin // BLOCK) * WIDTH + n
            scale = tl.load(of_all, right, 0.0)[None, :]
        else:
            block = expert * (DEPTH // BLOCK) + k // BLOCK
            scale = tl.load(scales + block[:, None] * WIDTH + n[None, :], there, 0.0)
        value = value * scale
    else:
        blocks: tl.constexpr = BLOCK_K // BLOCK
        WIDE: tl.constexpr = n.shape[0]
        pair = begin // 2 + tl.arange(0, BLOCK_K // 2)  # of inputs, which share a byte
        of = values + (expert * (DEPTH // 2) + pair)[:, None] * WIDTH + n[None, :]
        codes = tl.load(of, (pair < DEPTH // 2)[:, None] & right[None, :], 0).to(tl.int32)
        both = tl.join(float_of(codes & 15, 2, 1), float_of(codes >> 4, 2, 1))
        both = tl.reshape(tl.permute(both, (0, 2, 1)), (blocks, BLOCK, WIDE))
        each = begin // BLOCK + tl.arange(0, blocks)
        some = each < DEPTH // BLOCK
        at = expert * (DEPTH // BLOCK) + each
        scale = tl.load(
            scales + at[:, None] * WIDTH + n[None, :], some[:, None] & right[None, :], 0
        )
        both = both * float_of(scale, 4, 3)[:, None, :]
        if BY_INPUT:
            both = both * tl.load(scales_2 + at, some, 0.0)[:, None, None]
        else:
            both = both * tl.load(scales_2 + expert * WIDTH + n, right, 0.0)[None, None, :]
        value = tl.reshape(both, (BLOCK_K, WIDE))
    return value


@triton.jit
def scaled_product(
    x, values, scales, scales_2,
    rows,
    parts,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BY_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (i, s, j) multiplies BLOCK_M rows by BLOCK_N columns, over split s of the inputs."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    some, right = m < rows, n < WIDTH
    share = tl.cdiv(tl.cdiv(DEPTH, splits), BLOCK_K) * BLOCK_K
    first = split * share
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(first, tl.minimum(first + share, DEPTH), BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        deep = k < DEPTH
        given = tl.load(x + m[:, None] * DEPTH + k[None, :], some[:, None] & deep[None, :], 0.0)
        weight = scaled_tile(
            values, scales, scales_2, 0, begin, k, n, deep, right,
            DEPTH, WIDTH, BLOCK, BY_INPUT, BLOCK_K,
        )  # fmt: skip
        total = tl.dot(given, weight.to(given.dtype), total, input_precision="ieee")
    to = parts + (split * rows + m)[:, None] * WIDTH + n[None, :]
    tl.store(to, total, some[:, None] & right[None, :])


def product_launch(x: Tensor, values: Tensor, scales: Tensor, scales_2: Tensor | None) -> Launch:
    """Make the launch for x [rows, K]; its output [splits, rows, N] is summed over the splits.

    How a row is summed does not depend on the rows beside it.
    """
    (rows, K), N = x.shape, values.shape[1]
    block = tile(min(rows, MAX_TOKENS)) if isinstance(rows, int) else OPEN_BLOCK
    columns = cdiv(N, BLOCK_N)
    splits = max(1, min(PROGRAMS // columns, K // SPLIT_INPUTS))
    parts = x.new_empty(splits, rows, N, dtype=torch.float32)
    constants = {
        **{"DEPTH": K, "WIDTH": N, "BLOCK": K // scales.shape[0]},
        "BY_INPUT": scales_2 is not None and scales_2.shape != (1, N),
        **{"BLOCK_M": block, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K},
    }
    inputs = (x, values, scales, scales_2)
    grid = (columns, splits, cdiv(rows, block))
    return Launch(scaled_product, grid, inputs, (rows,), (parts,), constants)


@by_kernels(matmul_scaled)
def few_rows(x: Tensor, values: Tensor, scales: Tensor, scales_2: Tensor | None = None) -> Tensor:
    """Multiply by the kernel, which is for few tokens."""
    (parts,) = product_launch(x.flatten(0, -2).contiguous(), values, scales, scales_2).run()
    return parts.sum(0).to(x.dtype).unflatten(0, x.shape[:-1])


def matmul_scaled_triton(x: Tensor, *weight: Any) -> Tensor:
    """Do matmul_scaled on a GPU, in a step by the kernel and elsewhere by the reference.

    A step knows how many tokens a slot has. (While it is traced the number of slots may be a
    symbol, and a prompt's chunk is one.)
    """
    tokens = math.prod(x.shape[:-1])
    many = isinstance(tokens, int) and tokens > MAX_TOKENS
    if many or not isinstance(x.shape[-2], int):
        return x @ dequantise(*weight).to(x.dtype)
    return few_rows(x, *weight)
