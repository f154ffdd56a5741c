"""Products with a tile of a plain, fp8 or nvfp4 weight in Triton, for the kernels that sum tiles.

With bf16 rows, fp8 and nvfp4 weights are read in WORDS of four columns. Tensor cores take each of
the four columns as a matrix of its own, in the registers in which it was expanded; only the sums
are put side by side again. What is multiplied is exact: scales of fp8 multiply a tile's fp32 sums,
block scales of nvfp4 their values (2 + 4 bits), global ones the sum of all tiles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.codes import (
    SMALLER,
    e2m1_of_words,
    e4m3_of_words,
    float_of,
    scales_of_words,
)
from mtpbuild.plugins.launch import MULTIPROCESSORS

PROGRAMS = 2 * MULTIPROCESSORS
SPLIT_INPUTS = 512  # a split of fewer inputs costs more than it saves


@triton.jit
def _pairs(BLOCK_K: tl.constexpr):
    """Order pairs of inputs so that a thread has whole blocks of 8, which share scales.

    A thread of a tensor core's operand has entries 2 t and 2 t + 1 of every 8 (t is 0 to 3): here
    they are of quarter t of the tile.
    """
    i = tl.arange(0, BLOCK_K // 2)
    return i // 2 % 4 * (BLOCK_K // 8) + i // 8 * 2 + i % 2


@triton.jit
def _of_pairs(scale, BLOCK_K: tl.constexpr):
    """Give scales of a tile's blocks, as `_nvfp4_words` orders them, to pairs [BLOCK_K / 2, W]."""
    W: tl.constexpr = scale.shape[1]
    each = tl.reshape(scale, (BLOCK_K // 64, 1, 4, 1, W))
    each = tl.broadcast_to(each, (BLOCK_K // 64, 4, 4, 2, W))
    return tl.reshape(each, (BLOCK_K // 2, W))


@triton.jit
def load_rows(
    x, row, some, begin,
    DEPTH: tl.constexpr, BLOCK_K: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Load a tile's inputs, from `begin` on, of rows of x [.., DEPTH]; what is not there is 0.

    PAIRED: as int32 words of two bf16 each, in the order of `_pairs`.
    """
    if PAIRED:
        k = begin // 2 + _pairs(BLOCK_K)
        at = x.to(tl.pointer_type(tl.int32)) + row[:, None] * (DEPTH // 2) + k[None, :]
        rows = tl.load(at, some[:, None] & (k < DEPTH // 2)[None, :], 0)
    else:
        k = begin + tl.arange(0, BLOCK_K)
        at = x + row[:, None] * DEPTH + k[None, :]
        rows = tl.load(at, some[:, None] & (k < DEPTH)[None, :], 0.0)
    return rows


@triton.jit
def tile_product(
    given, values, scales, scales_2, expert, begin, n,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BY_INPUT: tl.constexpr,
    WORDS: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply rows by inputs from `begin` on and columns from n on of a weight [DEPTH, WIDTH].

    `given` has the tile's inputs, PAIRED for nvfp4 in WORDS. Values beyond the weight are 0.
    `expert` picks one weight of a stack. BLOCK inputs share a scale. BY_INPUT says that scales_2
    are per inputs too; where they are not, `with_global_scales` multiplies the sum by them.
    """
    if scales is not None and WORDS:
        if scales_2 is None:
            part = _fp8_words(
                given, values, scales, expert, begin, n,
                DEPTH, WIDTH, BLOCK, ASSEMBLY, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            part = _nvfp4_words(
                given, values, scales, scales_2, expert, begin, n,
                DEPTH, WIDTH, BY_INPUT, ASSEMBLY, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        columns = n + tl.arange(0, BLOCK_N)
        k = begin + tl.arange(0, BLOCK_K)
        deep, right = k < DEPTH, columns < WIDTH
        there = deep[:, None] & right[None, :]
        if scales_2 is None:
            row = (expert * DEPTH + k).to(tl.int64)[:, None]  # a head may have over 2^31 values
            weight = tl.load(values + row * WIDTH + columns[None, :], there, 0)
        else:
            pair = begin // 2 + tl.arange(0, BLOCK_K // 2)
            of = values + (expert * (DEPTH // 2) + pair)[:, None] * WIDTH + columns[None, :]
            codes = tl.load(of, (2 * pair < DEPTH)[:, None] & right[None, :], 0).to(tl.int32)
            both = tl.permute(tl.join(codes, codes >> 4), (0, 2, 1))
            weight = tl.reshape(float_of(both, 2, 1), (BLOCK_K, BLOCK_N))
        if scales is not None:
            at = (expert * (DEPTH // BLOCK) + k // BLOCK)[:, None] * WIDTH + columns[None, :]
            scale = tl.load(scales + at, there, 0)
            if scales_2 is None:
                weight = float_of(weight, 4, 3) * scale
            else:
                weight = weight * float_of(scale, 4, 3)
                if BY_INPUT:
                    weight *= tl.load(scales_2 + k // BLOCK, deep, 0.0)[:, None]
        part = tl.dot(given, weight.to(given.dtype), input_precision="ieee")
    return part


@triton.jit
def _fp8_words(
    given, values, scales, expert, begin, n,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ASSEMBLY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    columns, word = n + tl.arange(0, BLOCK_N), n // 4 + tl.arange(0, BLOCK_N // 4)
    k = expert * DEPTH + begin + tl.arange(0, BLOCK_K)
    of = values.to(tl.pointer_type(tl.int32)) + k[:, None] * (WIDTH // 4) + word[None, :]
    words = tl.load(of, (word < WIDTH // 4)[None, :], 0)
    a, b, c, d = e4m3_of_words(words, ASSEMBLY)
    part = _side_by_side(tl.dot(given, a), tl.dot(given, b), tl.dot(given, c), tl.dot(given, d))
    of_all = scales + (expert * (DEPTH // BLOCK) + begin // BLOCK) * WIDTH + columns
    return part * tl.load(of_all, columns < WIDTH, 0.0)[None, :]


@triton.jit
def _nvfp4_words(
    given, values, scales, scales_2, expert, begin, n,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BY_INPUT: tl.constexpr, ASSEMBLY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    word = n // 4 + tl.arange(0, BLOCK_N // 4)
    right = (word < WIDTH // 4)[None, :]
    pair = begin // 2 + _pairs(BLOCK_K)
    of = (expert * (DEPTH // 2) + pair)[:, None] * (WIDTH // 4) + word[None, :]
    there = right if DEPTH % BLOCK_K == 0 else right & (pair < DEPTH // 2)[:, None]
    words = tl.load(values.to(tl.pointer_type(tl.int32)) + of, there, 0)
    i = tl.arange(0, BLOCK_K // 16)
    block = begin // 16 + i % 4 * (BLOCK_K // 64) + i // 4  # as _of_pairs takes them
    of = (expert * (DEPTH // 16) + block)[:, None] * (WIDTH // 4) + word[None, :]
    there = right if DEPTH % BLOCK_K == 0 else right & (block < DEPTH // 16)[:, None]
    scale = tl.load(scales.to(tl.pointer_type(tl.int32)) + of, there, 0)
    a, b, c, d = scales_of_words(scale, ASSEMBLY)
    a, b = _of_pairs(a, BLOCK_K), _of_pairs(b, BLOCK_K)
    c, d = _of_pairs(c, BLOCK_K), _of_pairs(d, BLOCK_K)
    a0, a1, b0, b1, c0, c1, d0, d1 = e2m1_of_words(words, a, b, c, d, ASSEMBLY)
    low = given.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (given >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if BY_INPUT:
        by = tl.load(scales_2 + pair // 8, pair < DEPTH // 2, 0.0)[None, :]
        low, high = (low * by).to(tl.bfloat16), (high * by).to(tl.bfloat16)
    a = tl.dot(high, a1, tl.dot(low, a0))
    b = tl.dot(high, b1, tl.dot(low, b0))
    c = tl.dot(high, c1, tl.dot(low, c0))
    d = tl.dot(high, d1, tl.dot(low, d0))
    return _side_by_side(a, b, c, d)


@triton.jit
def _side_by_side(a, b, c, d):
    """Put column j of four tensors [M, W] to columns 4 j to 4 j + 3."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4 * a.shape[1]))


@triton.jit
def with_global_scales(
    total, scales_2, expert, n,
    WIDTH: tl.constexpr, BY_INPUT: tl.constexpr, WORDS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiply the sum of all tiles by what `tile_product` left out."""
    if scales_2 is not None:
        if not BY_INPUT:
            columns = n + tl.arange(0, BLOCK_N)
            by = tl.load(scales_2 + expert * WIDTH + columns, columns < WIDTH, 0.0)
            total *= by[None, :]
        if WORDS:
            total *= SMALLER
    return total


def tile_constants(
    x: torch.dtype, values: Tensor, scales: Tensor | None, scales_2: Tensor | None
) -> dict[str, Any]:
    """Choose tiles for rows of that type and a weight, or a stack, as `matmul_scaled` takes it.

    They are the constants of `tile_product`, with the BLOCK_M rows that are multiplied at a time,
    and fit into the shared memory of an AOT plugin. STAGES - 1 tiles are copied ahead.
    """
    from triton import knobs

    width, halves = values.shape[-1], 1 if scales_2 is None else 2
    depth = values.shape[-2] * halves
    block = depth if scales is None else depth // scales.shape[-2]
    wide, deep, stages, words = (64, 64, 1, False) if x != torch.bfloat16 else (128, 64, 3, False)
    if scales is not None and x == torch.bfloat16:
        together = 128 if scales_2 is not None else min(block & -block, 128)  # share scales of fp8
        words = width % 4 == 0 and together >= 16
        wide, deep, stages = (128, together, 3) if words else (64, 64, 1)
    return {
        **{"BLOCK": block, "WORDS": words, "ASSEMBLY": not knobs.runtime.interpret},
        "BY_INPUT": scales_2 is not None and scales_2.shape[-2:] != (1, width),
        **{"BLOCK_M": 16, "BLOCK_N": wide, "BLOCK_K": deep, "STAGES": stages},
    }


def split_count(programs: int, depth: int) -> int:
    """Count the splits of `depth` inputs that give every multiprocessor a program or two."""
    return max(1, min(PROGRAMS // programs, depth // SPLIT_INPUTS))
