"""experts: rows through an expert each, whose weights are floats."""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("mtpbuild::experts", mutates_args=())
def experts(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute down(silu(gate(x)) * up(x)) [N, E] of rows x [N, E], with the expert ids [N] of each.

    gate_up is [X, 2 I, E], whose outputs are a gate, its up, the next gate, and so on; down is
    [X, E, I]. The reference gathers a copy of the weights for each row; a facet reads those of an
    expert once, however many rows are its own.
    """
    h = torch.einsum("ne,noe->no", x, gate_up.index_select(0, ids))
    inner = F.silu(h[:, ::2]) * h[:, 1::2]
    return torch.einsum("ni,noi->no", inner, down.index_select(0, ids))


experts.register_fake(lambda x, *others: torch.empty_like(x))
