"""experts_nbits: rows through an expert each, whose weights are in blocks of 32 columns."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.matmul_nbits.op import BLOCK, dequantise


@torch.library.custom_op("mtpbuild::experts_nbits", mutates_args=())
def experts_nbits(
    x: Tensor,
    ids: Tensor,
    gate_up_values: Tensor,
    gate_up_scales: Tensor,
    down_values: Tensor,
    down_scales: Tensor,
) -> Tensor:
    """Compute down(silu(gate(x)) * up(x)) [N, E] of rows x [N, E], with the expert ids [N] of each.

    values uint8 [X, outputs, bytes] and scales [X, outputs, inputs / 32] of each product, in the
    blocks of `matmul_nbits`; gate_up's outputs are a gate, its up, the next gate, and so on. Both
    have the same bits. A target may round what goes into a product to int8 per row and block.
    """
    h = torch.einsum("ne,noe->no", x, _chosen(ids, gate_up_values, gate_up_scales))
    inner = F.silu(h[:, ::2]) * h[:, 1::2]
    return torch.einsum("ni,noi->no", inner, _chosen(ids, down_values, down_scales))


experts_nbits.register_fake(lambda x, *others: torch.empty_like(x))


def bits_of(values: Tensor, scales: Tensor) -> int:
    """Bits of one weight; `scales` say how many there are."""
    return values.shape[-1] * 8 // (scales.shape[-1] * BLOCK)


def _chosen(ids: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """Dequantise the weights [N, outputs, inputs] of each row's expert."""
    own, factors = values.index_select(0, ids), scales.index_select(0, ids)
    return dequantise(own.unflatten(-1, (scales.shape[-1], -1)), factors, bits_of(values, scales))
