"""weigh_experts: multiply the outputs of all experts by their weights for each token."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import Node, define


@define(lambda x: torch.empty_like(x), Node("Weigh"))
def weigh_experts(x: Tensor, weights: Tensor, ids: Tensor, experts: int, always: int) -> Tensor:
    """Weight x [.., X * I], I numbers for each of X = `experts` experts, by `moe_route`'s results.

    weights and int32 ids [.., k]. An expert that is not among the ids has weight 0; the last
    `always` experts, which are shared, have weight 1.
    """
    every = weights.new_zeros(*weights.shape[:-1], experts - always)
    every = every.scatter(-1, ids.long(), weights)
    if always:
        every = torch.cat([every, every.new_ones(*weights.shape[:-1], always)], dim=-1)
    return (x.unflatten(-1, (experts, -1)) * every[..., None]).type_as(x).flatten(-2)
