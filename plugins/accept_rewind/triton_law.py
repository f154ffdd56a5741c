"""`shaped_probs` in Triton: a row's filtered distribution, found without sorting it."""

import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.accept_rewind.triton_mixed import floor_of_row, weights_of
from mtpbuild.plugins.launch import Launch, tile

BLOCK = 4096


@triton.jit
def shape_row(
    logits, temperature, top_k, top_p, min_p,
    vocab,
    probs,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r: row slot * TOKENS + token of probs [B, TOKENS, vocab], as the op says."""
    r = tl.program_id(0)
    b = r // TOKENS
    row, to = logits + r.to(tl.int64) * vocab, probs + r.to(tl.int64) * vocab
    t = tl.load(temperature + b)
    sampled = t > 0
    t = tl.where(sampled, t, 1.0)
    top = float("-inf")
    for begin in range(0, vocab, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.max(tl.load(row + v, v < vocab, float("-inf")), 0))
    highest = top / t
    floor = 0.0
    if sampled:
        floor = floor_of_row(
            row, vocab, t, highest, False, row,
            tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b), 0, BLOCK,
        )  # fmt: skip
    norm = 0.0
    for begin in range(0, vocab, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        e = weights_of(row, v, vocab, t, highest, False, row, 0)
        norm += tl.sum(tl.where(e >= floor, e, 0.0), 0)
    for begin in range(0, vocab, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        e = weights_of(row, v, vocab, t, highest, False, row, 0)
        tl.store(to + v, tl.where(e >= floor, e / norm, 0.0), v < vocab)


def law_launch(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Launch:
    """Operands as of the op; the launch's output is its result."""
    B, T, V = logits.shape
    operands = logits, temperature, top_k, top_p, min_p
    constants = {"TOKENS": T, "BLOCK": min(BLOCK, tile(V))}
    return Launch(
        shape_row, (B * T,), operands, (V,), (logits.new_empty(B, T, V),), constants, warps=8
    )
