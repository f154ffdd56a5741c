"""gated_packed: silu(gate) * up of an MLP, with a weight in the layout of the CPU's kernels."""

from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.gelu_gate.op import apply_gate
from mtpbuild.plugins.product_packed.op import unpacked


@define(
    lambda x, outputs: x.new_empty(*x.shape[:-1], outputs // 2),
    Node("GatedProduct", renamed={"outputs": "N"}),
)
def gated_packed(
    x: Tensor,
    values: Tensor,
    scales: Tensor | None,
    outputs: int,
    gelu: bool = False,
    limit: float = 0.0,
) -> Tensor:
    """Compute silu(gate(x)) * up(x), or with gelu, of x [.., K] -> fp32 [.., outputs / 2].

    limit: as `apply_gate` has it.

    The weight is in the layout of `product_packed`, the gates first; outputs is a multiple of 64.
    """
    gate, up = (x @ unpacked(values, scales, outputs).mT).chunk(2, dim=-1)
    return apply_gate(gate, up, gelu, limit)
