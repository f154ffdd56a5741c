"""weigh_experts: multiply the outputs of all experts by their weights for each token."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import Node, define


@define(lambda x: torch.empty_like(x), Node("Weigh"))
def weigh_experts(x: Tensor, weights: Tensor, ids: Tensor, experts: int, always: int) -> Tensor:
    """Multiply each expert's I numbers of x [.., X * I] by the expert's weight; X = `experts`.

    weights and int32 ids [.., k] are results of `moe_route`. An expert that is not among the ids
    has weight 0; the last `always` experts, which are shared, have weight 1.
    """
    every = weights.new_zeros(*weights.shape[:-1], experts - always)
    every = every.scatter(-1, ids.long(), weights)
    if always:
        every = torch.cat([every, every.new_ones(*weights.shape[:-1], always)], dim=-1)
    return (x.unflatten(-1, (experts, -1)) * every[..., None]).type_as(x).flatten(-2)
