"""Products of rows with tiles of an unquantised, fp8 or nvfp4 weight, for Triton kernels.

With bf16 rows, fp8 and nvfp4 weights are read in WORDS of four columns. Column j of all words forms
matrix j of four. Tensor cores multiply each matrix in the registers in which it was converted; only
the sums are interleaved again. The factors of each product are exact: fp8 scales multiply a tile's
fp32 sums, nvfp4 block scales multiply the values (2 + 4 bits), and global scales multiply the sum
of all tiles.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.codes import (
    SMALLER,
    assembly_on,
    e2m1_of_words,
    e4m3_of_words,
    float_of,
    halves,
    scales_of_words,
)
from mtpbuild.plugins.launch import (
    AOT_SHARED,
    MULTIPROCESSORS,
    cdiv,
    is_hopper,
    shared_memory,
)

PROGRAMS = 2 * MULTIPROCESSORS
DEEP_PROGRAMS = 160  # of kernels that copy four tiles ahead: enough for a B200's 148 SMs
JOINED = 7  # most splits whose sum AOTInductor unrolls and fuses into the kernel that reads it
NEARLY = 0.9  # JOINED splits are enough if they keep this share of the multiprocessors busy
SPLIT_INPUTS = 448  # a split of fewer inputs costs more than it saves
PLAIN_SPLIT_INPUTS = 256  # the same for weights without scales, which have more bytes


@triton.jit
def product_with_weight(
    x, rows, count, values, scales, scales_2, expert, begin, end, n,
    EACH: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BY_INPUT: tl.constexpr, WORDS: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x [.., DEPTH] by the weight's columns from n on, over inputs begin to end.

    rows: indices; EACH adjacent indices stand for one row of x, and those from `count` on for none.
    The weight is [DEPTH, WIDTH], read as 0 outside; `expert` selects one weight of a stack. BLOCK
    inputs share a scale. BY_INPUT: there is one of scales_2 for each block of inputs.
    """
    total = tl.zeros((rows.shape[0], BLOCK_N), tl.float32)
    for first in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        pointers = x + (rows // EACH)[:, None] * DEPTH + k[None, :]
        tile = tl.load(pointers, (rows < count)[:, None] & (k < DEPTH)[None, :], 0.0)
        total = _tile_product(
            total, tile, values, scales, scales_2, expert, first, n,
            DEPTH, WIDTH, BLOCK, BY_INPUT, WORDS, ASSEMBLY, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if scales_2 is not None:
        if not BY_INPUT:
            columns = n + tl.arange(0, BLOCK_N)
            by = tl.load(scales_2 + expert * WIDTH + columns, columns < WIDTH, 0.0)
            total *= by[None, :]
        if WORDS:
            total *= SMALLER
    return total


@triton.jit
def _tile_product(
    total, tile, values, scales, scales_2, expert, begin, n,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BY_INPUT: tl.constexpr,
    WORDS: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add to `total` the product of rows with a weight's tile, from input `begin` and column n on.

    tile: the rows' inputs for that tile. `product_with_weight` multiplies the sum of all tiles by
    the factors that are left out here.
    """
    if scales is not None and WORDS:
        if scales_2 is None:
            total += _fp8_words(
                tile, values, scales, expert, begin, n,
                DEPTH, WIDTH, BLOCK, ASSEMBLY, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            total = _nvfp4_words(
                total, tile, values, scales, scales_2, expert, begin, n,
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
        if scales is None:
            tile = tile.to(weight.dtype)
        # Of fp32 the tensor cores multiply three parts, which is as exact and faster.
        total += tl.dot(tile, weight.to(tile.dtype), input_precision="tf32x3")
    return total


@triton.jit
def _fp8_words(
    tile, values, scales, expert, begin, n,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ASSEMBLY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    columns, word = n + tl.arange(0, BLOCK_N), n // 4 + tl.arange(0, BLOCK_N // 4)
    k = expert * DEPTH + begin + tl.arange(0, BLOCK_K)
    of = values.to(tl.pointer_type(tl.int32)) + k[:, None] * (WIDTH // 4) + word[None, :]
    words = tl.load(of, (word < WIDTH // 4)[None, :], 0)
    a, b, c, d = e4m3_of_words(words, ASSEMBLY)
    part = _side_by_side(tl.dot(tile, a), tl.dot(tile, b), tl.dot(tile, c), tl.dot(tile, d))
    of_all = scales + (expert * (DEPTH // BLOCK) + begin // BLOCK) * WIDTH + columns
    return part * tl.load(of_all, columns < WIDTH, 0.0)[None, :]


@triton.jit
def _nvfp4_words(
    total, tile, values, scales, scales_2, expert, begin, n,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BY_INPUT: tl.constexpr, ASSEMBLY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = BLOCK_N // 4
    # A warp copies 8 words of 4 rows at a time: it reads whole sectors of 32 bytes, and writes each
    # word to a different bank of shared memory, in which the words of a column are adjacent.
    eighth, word = tl.arange(0, W // 8)[:, None, None], tl.arange(0, 8)[None, None, :]
    word = n // 4 + 8 * eighth + word
    # With 64-bit indices the assembler adds constants to one address; with 32-bit ones it computes
    # every address.
    pair = begin // 2 + tl.arange(0, BLOCK_K // 2).to(tl.int64)
    of = (expert * (DEPTH // 2) + pair)[None, :, None] * (WIDTH // 4) + word
    there = word < WIDTH // 4
    if DEPTH % BLOCK_K != 0:
        there = there & (pair < DEPTH // 2)[None, :, None]
    words = tl.load(values.to(tl.pointer_type(tl.int32)) + of, there, 0)
    words = tl.reshape(tl.permute(words, (1, 0, 2)), (BLOCK_K // 2, W))
    word = n // 4 + tl.arange(0, W)
    block = begin // 16 + tl.arange(0, BLOCK_K // 16)
    of = (expert * (DEPTH // 16) + block)[:, None] * (WIDTH // 4) + word[None, :]
    there = (word < WIDTH // 4)[None, :]
    if DEPTH % BLOCK_K != 0:
        there = there & (block < DEPTH // 16)[:, None]
    scale = tl.load(scales.to(tl.pointer_type(tl.int32)) + of, there, 0)
    a, b, c, d = scales_of_words(scale, ASSEMBLY)
    a, b, c, d = _of_pairs(a), _of_pairs(b), _of_pairs(c), _of_pairs(d)
    a, b, c, d = e2m1_of_words(words, a, b, c, d, ASSEMBLY)
    if BY_INPUT:
        k = begin + tl.arange(0, BLOCK_K)
        tile = (tile * tl.load(scales_2 + k // 16, k < DEPTH, 0.0)[None, :]).to(tile.dtype)
    sums_a, sums_b, sums_c, sums_d = _apart(total)
    sums_a = tl.dot(tile, _one_below_the_other(a), sums_a)
    sums_b = tl.dot(tile, _one_below_the_other(b), sums_b)
    sums_c = tl.dot(tile, _one_below_the_other(c), sums_c)
    sums_d = tl.dot(tile, _one_below_the_other(d), sums_d)
    return _side_by_side(sums_a, sums_b, sums_c, sums_d)


@triton.jit
def _of_pairs(scale):
    """Repeat a block's scale for its 8 pairs of inputs: [B, W] -> [8 B, W]."""
    B: tl.constexpr = scale.shape[0]
    W: tl.constexpr = scale.shape[1]
    return tl.reshape(tl.broadcast_to(scale[:, None, :], (B, 8, W)), (8 * B, W))


@triton.jit
def _one_below_the_other(words):
    """Move the halves of row i to rows 2 i and 2 i + 1: [P, W] -> bf16 [2 P, W]."""
    low, high = halves(words)
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(both, (2 * words.shape[0], words.shape[1]))


@triton.jit
def _side_by_side(a, b, c, d):
    """Interleave four tensors [M, W]: their columns j become columns 4 j to 4 j + 3."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4 * a.shape[1]))


@triton.jit
def _apart(total):
    """Undo `_side_by_side`: split a tensor [M, 4 W] into four."""
    ac, bd = tl.split(tl.reshape(total, (total.shape[0], total.shape[1] // 4, 2, 2)))
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d


def choose_tiles(
    x: Tensor, values: Tensor, scales: Tensor | None, scales_2: Tensor | None
) -> dict[str, Any]:
    """Choose tiles for rows x [.., K] and a weight, or a stack, in the layout of `matmul_scaled`.

    Returns the constants of `product_with_weight`, BLOCK_M, the rows multiplied at a time, and
    PROGRAMS, how many of them keep a GPU reading. On meta tensors the tiles fit into the shared
    memory of an AOT plugin. STAGES - 1 tiles are copied ahead.
    """
    programs = PROGRAMS
    width = values.shape[-1]
    depth = values.shape[-2] * (1 if scales_2 is None else 2)
    block = depth if scales is None else depth // scales.shape[-2]
    in_bf16 = x.dtype == torch.bfloat16
    words = width % 4 == 0 and scales is not None
    together = min(block & -block, 128)  # inputs with the same fp8 scale
    if in_bf16 and words and scales_2 is not None and is_hopper(x.device):
        wide, deep, stages = 128, 64, 4
    elif in_bf16 and words and scales_2 is not None:
        tiles = cdiv(width, 256) * max(1, depth // SPLIT_INPUTS)
        enough = values.dim() > 2 or 2 * tiles >= MULTIPROCESSORS  # a stack has many experts
        wide, deep, stages = (256 if width >= 256 and enough else 128), 64, 5
        programs = DEEP_PROGRAMS
    elif in_bf16 and words and together >= 16:
        wide, deep, stages = 128, together, 3
    elif scales is None and values.element_size() == 2:
        wide, deep, stages = 128, 64, 3
        if shared_memory(x.device) > AOT_SHARED:
            stages, programs = 4, DEEP_PROGRAMS
    elif scales is None:
        wide, deep, stages = 32, 64, 3
    else:
        wide, deep, stages = 64, 64, 1
    return {
        **{"BLOCK": block, "WORDS": words and stages > 1, "ASSEMBLY": assembly_on(x.device)},
        "BY_INPUT": scales_2 is not None and scales_2.shape[-2:] != (1, width),
        **{"BLOCK_M": 16, "BLOCK_N": wide, "BLOCK_K": deep, "STAGES": stages},
        "PROGRAMS": programs,
    }


def count_splits(programs: int, depth: int, constants: Mapping[str, Any]) -> int:
    """Return into how many splits to divide `depth` inputs, to keep all multiprocessors reading.

    Each split has one or more whole tiles. programs: of one split. constants: of `choose_tiles`.
    """
    tiles = cdiv(depth, constants["BLOCK_K"])
    wanted = constants["PROGRAMS"]
    if constants["STAGES"] > 3 and JOINED * programs >= NEARLY * MULTIPROCESSORS:
        wanted = min(wanted, JOINED * programs)
    least = PLAIN_SPLIT_INPUTS if constants["BLOCK"] == depth else SPLIT_INPUTS
    splits = max(1, min(wanted // programs, depth // least, tiles))
    return cdiv(tiles, cdiv(tiles, splits))
