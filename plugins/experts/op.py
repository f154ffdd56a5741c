"""experts: run each row through its own expert, with float weights."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import define
from mtpbuild.plugins.gelu_gate.op import apply_gate


def has_silu(
    x: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gelu: bool = False,
    limit: float = 0.0,
) -> bool:
    return not gelu and not limit


@define(lambda x: torch.empty_like(x), fits=has_silu)
def experts(
    x: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gelu: bool = False,
    limit: float = 0.0,
) -> Tensor:
    """Compute down(silu(gate(x)) * up(x)) [N, E] for rows x [N, E], row n with expert ids[n].

    gelu: in place of silu. limit: as `apply_gate` has it.

    gate_up [X, 2 I, E] and down [X, E, I] are the stacked weights of all experts; gate_up's outputs
    alternate: a gate, its up, the next gate, and so on. The reference gathers a copy of the weights
    for each row; a facet reads an expert's weights once for all of its rows.
    """
    h = torch.einsum("ne,noe->no", x, gate_up.index_select(0, ids))
    gate, up = h[:, ::2], h[:, 1::2]
    inner = apply_gate(gate, up, gelu, limit)
    return torch.einsum("ni,noi->no", inner, down.index_select(0, ids))
