"""Mixtures of experts: of few experts all are computed, of many only the chosen ones.

Shapes: E hidden size, k chosen experts of a token, N tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mtpbuild.builder.checkpoint.config import ModelConfig, MoEConfig
from mtpbuild.builder.models.common.blocks import weigh_chosen
from mtpbuild.builder.models.common.collectives import (
    gather_stacked,
    make_rank_constant,
    scatter_sums,
)
from mtpbuild.builder.models.common.layers import MLP
from mtpbuild.builder.models.common.moe_config import computes_all_experts
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.plugins import moe_route, weigh_experts
from mtpbuild.plugins.moe.op import NO_EXPERT
from mtpbuild.runtime.ranks import Ranks


class Gate(nn.Module):
    """A sigmoid router in fp32; the biased scores select, the unbiased ones weigh."""

    by_fused_kernels = ("e_score_correction_bias",)

    def __init__(self, c: MoEConfig) -> None:
        super().__init__()
        self.config = c
        self.num_shared_in_stack = 0  # shared experts after the routed ones; every token gets them
        self.weight = parameter(c.hidden_size, c.n_routed_experts)
        self.e_score_correction_bias = parameter(c.n_routed_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and ids of a token's experts, both [.., k], for x [.., E].

        The shared experts of the stack come last and are not part of k.
        """
        c = self.config
        return moe_route(
            x.float() @ self.weight.float(),
            self.e_score_correction_bias,
            groups=c.n_group,
            kept_groups=c.topk_group,
            experts=c.num_experts_per_tok,
            normalise=c.norm_topk_prob,
            factor=c.routed_scaling_factor,
            always=self.num_shared_in_stack,
        )


class SoftmaxGate(nn.Module):
    """A softmax router in fp32; the same scores select and weigh."""

    num_shared_in_stack = 0

    def __init__(self, c: MoEConfig) -> None:
        super().__init__()
        self.config = c
        self.weight = parameter(c.hidden_size, c.n_routed_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and ids of a token's experts, both [.., k], for x [.., E]."""
        c = self.config
        scores = (x.float() @ self.weight.float()).softmax(-1)
        weights, ids = scores.topk(c.num_experts_per_tok, dim=-1)
        if c.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * c.routed_scaling_factor, ids.int()


class MoE(nn.Module):
    """The sum of a token's experts; with several ranks each computes a part of the sum.

    With attention-DP a rank gets the whole sum for its own tokens. Routed experts see the tokens of
    all ranks, so all ranks must have equally many.
    """

    def __init__(self, c: MoEConfig, ranks: Ranks) -> None:
        super().__init__()
        self.config, self.ranks = c, ranks
        self.gate = SoftmaxGate(c) if c.softmax_router else Gate(c)
        self.shared_experts: MLP | None = None  # None if there are none, or if `routed` has them
        if ranks.ep > 1 or ranks.attention_dp:
            self.rank = make_rank_constant()

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks.attention_dp:
            every = gather_stacked(x, self.rank, self.ranks.tp)
            # As more slots: kernels take [B, T, E], or [splits, B, T, E] for parts of a product.
            sums = self.routed(every.flatten(0, 1)).reshape(every.shape)
            y = scatter_sums(sums, self.rank)
        else:
            y = self.routed(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def routed(self, x: Tensor) -> Tensor:
        """Sum the chosen experts: x [.., E] -> [.., E]."""
        raise NotImplementedError


class DenseMoE(MoE):
    """Few experts, all computed by two products; unchosen ones weigh 0, shared ones 1."""

    def __init__(self, c: MoEConfig, ranks: Ranks) -> None:
        super().__init__(c, ranks)
        self.num_shared = 0 if ranks.attention_dp else c.n_shared_experts  # among `experts`
        inner = (c.n_routed_experts + self.num_shared) * c.moe_intermediate_size // ranks.tp
        self.experts = MLP(c.hidden_size, inner)
        if ranks.attention_dp:
            self.shared_experts = shared_experts(c, ranks)

    def routed(self, x: Tensor) -> Tensor:
        c = self.config
        weights, ids = self.gate(x)
        inner = self.experts.inner(x)
        if self.ranks.ep == 1:
            count = c.n_routed_experts + self.num_shared
            inner = weigh_experts(inner, weights, ids, experts=count, always=self.num_shared)
            return inner @ self.experts.down_proj
        every_weight = weights.new_zeros(*weights.shape[:-1], c.n_routed_experts)
        every_weight = every_weight.scatter(-1, ids.long(), weights)
        # Rank r has group r % ep. Not written as `rank % ep`, which the compiler would fold.
        ep = self.ranks.ep
        groups = every_weight.unflatten(-1, (ep, -1))
        if self.num_shared:  # a routed expert's part is as wide as ep parts of a shared one
            groups = groups.repeat_interleave(ep, dim=-1)
        repeated = torch.cat([groups] * (self.ranks.tp // ep), dim=-2)
        mine = repeated.index_select(-2, self.rank).squeeze(-2)
        if self.num_shared:
            mine = torch.cat([mine, mine.new_ones(*x.shape[:-1], self.num_shared)], dim=-1)
        inner = inner.unflatten(-1, (mine.shape[-1], -1))
        return cast(inner * mine[..., None], x.dtype).flatten(-2) @ self.experts.down_proj


class ExpertStack(nn.Module):
    """Routed experts in stacks of weights, which may hold a shared one, too."""

    by_kernels = ("gate_up_proj", "down_proj")  # weights that our kernels read
    gate: Any
    shared_experts: MLP | None

    def stack_shared_expert(self) -> None:
        """Make the shared expert the last one of the stack, which every token chooses."""
        for name in ("gate_up_proj", "down_proj"):
            experts, *shape = self.get_parameter(name).shape
            longer = parameter(experts + 1, *shape, dtype=self.get_parameter(name).dtype)
            setattr(self, name, longer)
        self.shared_experts = None
        self.gate.num_shared_in_stack = 1


class GatheredMoE(ExpertStack, MoE):
    """Many experts, of which only the chosen ones are read."""

    def __init__(self, c: MoEConfig, ranks: Ranks) -> None:
        super().__init__(c, ranks)
        experts = c.n_routed_experts // ranks.ep
        inner = c.moe_intermediate_size * ranks.ep // ranks.tp
        self.gate_up_proj = parameter(experts, c.hidden_size, 2 * inner)
        self.down_proj = parameter(experts, inner, c.hidden_size)
        self.shared_experts = shared_experts(c, ranks)

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x)
        if (ep := self.ranks.ep) > 1:
            experts = self.config.n_routed_experts // ep
            is_here = (self.rank - ids // experts) % ep == 0
            ids = torch.where(is_here, ids % experts, NO_EXPERT)
        return weigh_chosen(self.gate_up_proj, self.down_proj, x, weights, ids)


def shared_experts(c: MoEConfig, ranks: Ranks) -> MLP | None:
    inner = c.n_shared_experts * c.moe_intermediate_size // ranks.parts
    return MLP(c.hidden_size, inner) if inner else None


def feed_forward(c: ModelConfig, layer: int, ranks: Ranks) -> nn.Module:
    if not isinstance(c, MoEConfig) or not c.is_moe(layer):
        return MLP(c.hidden_size, c.intermediate_size // ranks.parts)
    return DenseMoE(c, ranks) if computes_all_experts(c) else GatheredMoE(c, ranks)
