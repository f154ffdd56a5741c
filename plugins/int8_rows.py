"""Cache rows in int8: all values, then an fp16 scale for each block of at most 32 of them.

A row has sections, such as a latent and a rotary key; no block has values of two sections. In a row
with a number that is not finite all values are NO_VALUE and all scales NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtpbuild.runtime.contract.programs import NO_VALUE

BLOCK = 32
MOST = 127


def round_rows(rows: Tensor, sections: Sequence[int]) -> Tensor:
    """Round fp32 rows [.., sum of sections] to int8 [.., bytes]: a block's largest becomes 127."""
    values, scales = list[Tensor](), list[Tensor]()
    for block in rows.split(blocks_of(sections), dim=-1):
        scale = (block.abs().amax(-1, keepdim=True) / MOST).half()
        inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
        values.append((block * inverse).clamp(-MOST, MOST).round())
        scales.append(scale)
    both, factors = torch.cat(values, dim=-1), torch.cat(scales, dim=-1)
    finite = factors.isfinite().all(-1, keepdim=True)
    both = torch.where(finite, both, float(NO_VALUE)).to(torch.int8)
    factors = torch.where(finite, factors, float("nan"))
    return torch.cat([both, factors.contiguous().view(torch.int8)], dim=-1)


def read_rows(rows: Tensor, sections: Sequence[int]) -> Tensor:
    """Return the numbers of int8 rows in fp32."""
    sizes = blocks_of(sections)
    values, scales = rows.split([sum(sizes), 2 * len(sizes)], dim=-1)
    factors = scales.contiguous().clone().view(torch.float16).float()
    return values * factors.repeat_interleave(torch.tensor(sizes), dim=-1)


def read_both(cache: Tensor, fresh: Tensor, sections: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return cached and fresh rows as attention reads them; a cache may have another type."""
    if cache.dtype == torch.int8:
        return read_rows(cache, sections), read_rows(round_rows(fresh, sections), sections)
    return cache.type_as(fresh), fresh


def round_as(cache: Tensor, fresh: Tensor, sections: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return fresh rows in the type of a cache, and as this pass reads them.

    They are the values that later passes read; attention over an int8 cache rounds them itself.
    """
    if cache.dtype == torch.int8:
        return round_rows(fresh, sections), fresh
    rounded = fresh.to(cache.dtype)
    return rounded, rounded.to(fresh.dtype)


def blocks_of(sections: Sequence[int]) -> list[int]:
    """Return the sizes of a row's blocks."""
    return [min(BLOCK, section - at) for section in sections for at in range(0, section, BLOCK)]
