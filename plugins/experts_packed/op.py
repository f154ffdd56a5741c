"""experts_packed: `experts_nbits`, with weights in the layout of the CPU's kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.cpu.layout import PANEL
from mtpbuild.plugins.product_packed.op import unpacked


@torch.library.custom_op("mtpbuild::experts_packed", mutates_args=())
def experts_packed(
    x: Tensor,
    ids: Tensor,
    gate_up_values: Tensor,
    gate_up_scales: Tensor | None,
    down_values: Tensor,
    down_scales: Tensor | None,
) -> Tensor:
    """Compute down(silu(gate(x)) * up(x)) [N, E] of rows x [N, E], with the expert ids [N] of each.

    Weights are `product_packed`'s, with the experts [X, ..] first. gate_up's panels are 32 gates,
    their ups, the next 32 gates, and so on. With integers the kernels round what goes into a
    product to int8 per row and block. In fp32 gates may be fewer than their panels hold.
    """
    outputs = gate_up_values.shape[1] * PANEL
    h = torch.einsum("ne,noe->no", x, _chosen(ids, gate_up_values, gate_up_scales, outputs))
    gate, up = h.unflatten(-1, (-1, 2, PANEL)).unbind(-2)
    down = _chosen(ids, down_values, down_scales, x.shape[-1])
    inner = (F.silu(gate) * up).flatten(-2).narrow(-1, 0, down.shape[-1])
    return torch.einsum("ni,noi->no", inner, down)


def _chosen(ids: Tensor, values: Tensor, scales: Tensor | None, outputs: int) -> Tensor:
    """Unpack the weights [N, outputs, inputs] of each row's expert."""
    own = None if scales is None else scales.index_select(0, ids)
    return unpacked(values.index_select(0, ids), own, outputs)


experts_packed.register_fake(lambda x, *others: torch.empty_like(x))
