"""gated_product: silu(x gate) * (x up), for one unquantised weight of gate and up."""

from math import prod

from torch import Tensor

from mtpbuild.plugins.definition import define
from mtpbuild.plugins.gelu_gate.op import apply_gate

MAX_TOKENS = 64


def has_few_rows(x: Tensor, gate_up: Tensor, limit: float = 0.0) -> bool:
    """Return whether the number of rows is known, and small enough for the kernel."""
    rows = prod(x.shape[:-1])
    return isinstance(rows, int) and rows <= MAX_TOKENS


@define(lambda x, gate_up: x.new_empty(*x.shape[:-1], gate_up.shape[-1] // 2), fits=has_few_rows)
def gated_product(x: Tensor, gate_up: Tensor, limit: float = 0.0) -> Tensor:
    """Compute silu(x gate) * (x up) [.., I] for x [.., E] and gate_up [E, 2 I], gate first.

    The kernel takes up to `MAX_TOKENS` tokens and gates the unrounded fp32 products.
    limit: as `apply_gate` has it.
    """
    gate, up = (x @ gate_up).chunk(2, dim=-1)
    return apply_gate(gate, up, False, limit)
