"""weigh_experts: multiplies the numbers of all experts by what each of them weighs for a token."""

import torch
from torch import Tensor


@torch.library.custom_op("mtpbuild::weigh_experts", mutates_args=())
def weigh_experts(x: Tensor, weights: Tensor, ids: Tensor, experts: int, always: int) -> Tensor:
    """Weighs x [.., X * I], I numbers of each of X = `experts` experts, by `moe_route`'s results.

    weights and int32 ids [.., k]; an expert that is not among the ids weighs 0, and the last
    `always` of them, which are shared, weigh 1.
    """
    every = weights.new_zeros(*weights.shape[:-1], experts - always)
    every = every.scatter(-1, ids.long(), weights)
    every = torch.cat([every, every.new_ones(*weights.shape[:-1], always)], dim=-1)
    return (x.unflatten(-1, (experts, -1)) * every[..., None]).flatten(-2)


weigh_experts.register_fake(lambda x, *others: torch.empty_like(x))
