"""gated_product in Triton: each program computes the same columns of gate and up."""

import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.gated_product.op import MAX_TOKENS, gated_product
from mtpbuild.plugins.launch import (
    AOT_SHARED,
    STAGES,
    Launch,
    Launches,
    cdiv,
    inputs_of_tile,
    round_up_to_tile,
    run_launches,
    shared_memory,
)


@triton.jit
def gate_by_silu(gate, up, LIMIT: tl.constexpr):
    """Return silu(gate) * up, within the limit that `apply_gate` has; NaN stay NaN."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(tl.abs(up) > LIMIT, tl.where(up > 0, LIMIT, -LIMIT), up)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def gated(
    x, gate_up,
    rows,
    inner,
    DEPTH: tl.constexpr, INNER: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program i computes BLOCK_N columns of silu(x gate) * (x up) for all rows."""
    m = tl.arange(0, BLOCK_M)[:, None]
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    some, right = m < rows, n < INNER
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, DEPTH, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        column = k[None, :]
        tile = tl.load(x + m * DEPTH + column, some & (column < DEPTH), 0.0)
        of = gate_up + k.to(tl.int64)[:, None] * (2 * INNER) + n
        there = (k < DEPTH)[:, None] & right
        gate = tl.dot(tile, tl.load(of, there, 0.0), gate, input_precision="ieee")
        up = tl.dot(tile, tl.load(of + INNER, there, 0.0), up, input_precision="ieee")
    value = gate_by_silu(gate, up, LIMIT)
    tl.store(inner + m * INNER + n, value.to(inner.dtype.element_ty), some & right)


def gated_product_launches(x: Tensor, gate_up: Tensor, limit: float = 0.0) -> Launches:
    """Return the op's launch. Raises NotImplementedError for more than `MAX_TOKENS` tokens."""
    (*slots, E), width = x.shape, gate_up.shape[1] // 2
    rows = x.numel() // E
    if rows > MAX_TOKENS:
        raise NotImplementedError(f"gated_product takes up to {MAX_TOKENS} tokens, not {rows}")
    inner = x.new_empty(*slots, width)
    wide = 32
    stages = STAGES if shared_memory(x.device) == AOT_SHARED else 8
    constants = {"DEPTH": E, "INNER": width, "LIMIT": limit, "BLOCK_N": wide}
    constants |= {"BLOCK_M": round_up_to_tile(rows), "BLOCK_K": inputs_of_tile(x, E)}
    grid = (cdiv(width, wide),)
    launch = Launch(gated, grid, (x, gate_up), (rows,), (inner,), constants, stages=stages)
    return Launches((launch,), inner)


gated_product_triton = run_launches(gated_product, gated_product_launches, "x", "gate_up")
