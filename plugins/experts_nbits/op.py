"""experts_nbits: run each row through its own expert; weights have a scale per 32 inputs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import define
from mtpbuild.plugins.matmul_nbits.op import BLOCK, dequantise


@define(lambda x: torch.empty_like(x))
def experts_nbits(
    x: Tensor,
    ids: Tensor,
    gate_up_values: Tensor,
    gate_up_scales: Tensor,
    down_values: Tensor,
    down_scales: Tensor,
) -> Tensor:
    """Compute down(silu(gate(x)) * up(x)) [N, E] for rows x [N, E], row n with expert ids[n].

    Each product has values uint8 [X, outputs, bytes] and scales [X, outputs, inputs / 32] in the
    blocks of `matmul_nbits`, both products with the same bits. gate_up's outputs alternate: a gate,
    its up, the next gate, and so on. A target may round a product's input to int8 per row and
    block.
    """
    h = torch.einsum("ne,noe->no", x, _chosen(ids, gate_up_values, gate_up_scales))
    inner = F.silu(h[:, ::2]) * h[:, 1::2]
    return torch.einsum("ni,noi->no", inner, _chosen(ids, down_values, down_scales))


def bits_of(values: Tensor, scales: Tensor) -> int:
    """Return the bits per weight (8 or 4), from the bytes of `values` per scale."""
    return values.shape[-1] * 8 // (scales.shape[-1] * BLOCK)


def _chosen(ids: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """Dequantise the weights [N, outputs, inputs] of each row's expert."""
    own, factors = values.index_select(0, ids), scales.index_select(0, ids)
    return dequantise(own.unflatten(-1, (scales.shape[-1], -1)), factors, bits_of(values, scales))
