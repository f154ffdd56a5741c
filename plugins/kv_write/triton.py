"""kv_write in Triton: copy a slot's fresh rows as one contiguous block."""

import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.kv_write.op import kv_write
from mtpbuild.plugins.launch import Launch, by_kernels, cdiv

BLOCK = 1024


@triton.jit
def kv_copy(
    rows, start,
    capacity, width, count,
    cache,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, i) copies block i of the `count` values that slot b writes.

    A block has BLOCK values, a cache row `width`.
    """
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = (b * capacity + tl.load(start + b)) * width
    tl.store(cache + at + i, tl.load(rows + b * count + i, i < count), i < count)


def kv_launch(cache: Tensor, rows: Tensor, start: Tensor) -> Launch:
    """Return the op's launch, which writes into `cache` itself."""
    (B, _, S, C), count = cache.shape, rows.shape[2] * rows.shape[3]
    grid = B, cdiv(count, BLOCK)
    return Launch(kv_copy, grid, (rows, start), (S, C, count), (cache,), {"BLOCK": BLOCK})


@by_kernels(kv_write)
def kv_write_triton(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """Run kv_write on a GPU, on a copy of the cache; targets that work in place remove the copy."""
    return kv_launch(cache.clone(), rows.contiguous(), start).run()[0]
