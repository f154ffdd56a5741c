"""gated_product: silu(x gate) * (x up), for one unquantised weight of gate and up."""

from math import prod

import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import define

MAX_TOKENS = 64


def has_few_rows(x: Tensor, gate_up: Tensor) -> bool:
    """Return whether the number of rows is known, and small enough for the kernel."""
    rows = prod(x.shape[:-1])
    return isinstance(rows, int) and rows <= MAX_TOKENS


@define(lambda x, gate_up: x.new_empty(*x.shape[:-1], gate_up.shape[-1] // 2), fits=has_few_rows)
def gated_product(x: Tensor, gate_up: Tensor) -> Tensor:
    """Compute silu(x gate) * (x up) [.., I] for x [.., E] and gate_up [E, 2 I], gate first.

    The kernel takes up to `MAX_TOKENS` tokens and gates the unrounded fp32 products.
    """
    gate, up = (x @ gate_up).chunk(2, dim=-1)
    return F.silu(gate) * up
