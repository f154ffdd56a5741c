"""experts_packed: `moe`, with weights in the layout of the CPU's kernels."""

import torch
from torch import Tensor

from mtpbuild.plugins.cpu.layout import PANEL
from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.gelu_gate.op import apply_gate
from mtpbuild.plugins.moe.op import NO_EXPERT
from mtpbuild.plugins.product_packed.op import unpacked


@define(lambda x: torch.empty_like(x), Node("Experts"))
def experts_packed(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up_values: Tensor,
    gate_up_scales: Tensor | None,
    down_values: Tensor,
    down_scales: Tensor | None,
    gelu: bool = False,
    limit: float = 0.0,
) -> Tensor:
    """Sum down(silu(gate(x)) * up(x)) of the experts ids [.., k] for x [.., E]; weights [.., k].

    gelu: in place of silu. limit: as `apply_gate` has it.

    An id of `NO_EXPERT` stands for an expert on another rank and adds nothing. The experts' weights
    are in the layout of `product_packed`, with the experts [X, ..] first. gate_up's panels are 32
    gates, their ups, the next 32 gates, and so on. With integer weights the kernels round the
    inputs of products to int8 per row and block. With fp32 the last panel of gates may be padded.
    """
    outputs, width = gate_up_values.shape[1] * PANEL, x.shape[-1]
    chosen = ids.flatten().clamp(min=0)
    weights = torch.where(ids == NO_EXPERT, 0.0, weights)
    rows = x.reshape(-1, width).repeat_interleave(ids.shape[-1], dim=0)
    h = torch.einsum("ne,noe->no", rows, _chosen(chosen, gate_up_values, gate_up_scales, outputs))
    gate, up = h.unflatten(-1, (-1, 2, PANEL)).unbind(-2)
    down = _chosen(chosen, down_values, down_scales, width)
    inner = apply_gate(gate, up, gelu, limit).flatten(-2).narrow(-1, 0, down.shape[-1])
    y = torch.einsum("ni,noi->no", inner, down).reshape(*ids.shape, width)
    return (y * weights[..., None]).sum(-2)


def _chosen(ids: Tensor, values: Tensor, scales: Tensor | None, outputs: int) -> Tensor:
    """Unpack the weights [N, outputs, inputs] of each row's expert."""
    chosen_scales = None if scales is None else scales.index_select(0, ids)
    return unpacked(values.index_select(0, ids), chosen_scales, outputs)
