"""Mixtures of experts: if there are few, all are computed, else only the chosen ones.

Shapes: E hidden size, k chosen experts of a token, N tokens.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.blocks import ExpertRows, PackedExperts, parts_of
from mtpbuild.builder.models.common.collectives import every_rank, own_sum, rank_constant
from mtpbuild.builder.models.common.layers import MLP, KernelModule
from mtpbuild.builder.models.common.moe_config import DENSE_EXPERTS
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.config import MoEConfig
from mtpbuild.plugins import moe, moe_route, weigh_experts
from mtpbuild.plugins.moe.op import MAX_TOKENS, NOBODY, with_shared
from mtpbuild.runtime.ranks import ALONE, Ranks

PADDED_TOKENS = 64  # given at a time to a kernel with fixed sizes


class Gate(KernelModule):
    """A sigmoid router in fp32; the biased scores select, the unbiased ones weigh."""

    by_fused_kernels = ("e_score_correction_bias",)

    def __init__(self, c: MoEConfig) -> None:
        super().__init__()
        self.config = c
        self.always = 0  # number of shared experts that follow the routed ones and get every token
        self.weight = parameter(c.hidden_size, c.n_routed_experts)
        self.e_score_correction_bias = parameter(c.n_routed_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and ids of a token's experts, both [.., k], for x [.., E].

        The shared experts that `always` counts come last and are not part of k.
        """
        c, logits = self.config, x.float() @ self.weight.float()
        if self.fused:
            how = (c.n_group, c.topk_group, c.num_experts_per_tok)
            scaled = (c.norm_topk_prob, c.routed_scaling_factor)
            bias = self.e_score_correction_bias
            if not self.kernels:  # a CPU's op takes any number of axes
                return moe_route(logits, bias, *how, *scaled, self.always)
            weights, ids = moe_route(logits.flatten(0, -2), bias, *how, *scaled, self.always)
            return weights.unflatten(0, x.shape[:-1]), ids.unflatten(0, x.shape[:-1])
        scores = logits.sigmoid()
        biased = scores + self.e_score_correction_bias
        if c.topk_group < c.n_group:
            groups = biased.unflatten(-1, (c.n_group, -1))
            best_two = groups if groups.shape[-1] == 2 else groups.topk(2, dim=-1).values
            best = best_two.sum(-1).topk(c.topk_group, dim=-1).indices
            keep = torch.zeros_like(groups[..., 0]).scatter(-1, best, 1.0)[..., None]
            biased = torch.where(keep > 0, groups, float("-inf")).flatten(-2)
        ids = biased.topk(c.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, ids)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return with_shared(weights * c.routed_scaling_factor, ids, c.n_routed_experts, self.always)


class SoftmaxGate(nn.Module):
    """A softmax router in fp32; the same scores select and weigh."""

    always = 0
    fused = False  # no op implements it

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
        return weights * c.routed_scaling_factor, ids


class MoE(KernelModule):
    """The sum of a token's experts; with several ranks each computes a part of the sum.

    With attention-DP a rank gets the whole sum for its own tokens. Routed experts see the tokens of
    all ranks, so all ranks must have equally many.
    """

    def __init__(self, c: MoEConfig, ranks: Ranks) -> None:
        super().__init__()
        self.config, self.ranks = c, ranks
        self.gate = SoftmaxGate(c) if c.softmax_router else Gate(c)
        self.shared_experts: MLP | None = None  # those that `routed` leaves out
        if ranks.ep > 1 or ranks.attention_dp:
            self.rank = rank_constant()

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks.attention_dp:
            y = own_sum(self.routed(every_rank(x, self.rank, self.ranks.tp)), self.rank)
        else:
            y = self.routed(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def routed(self, x: Tensor) -> Tensor:
        """Sum the chosen experts: x [.., E] -> [.., E]."""
        raise NotImplementedError


class DenseMoE(MoE):
    """All of few experts in two products; unchosen ones weigh 0, shared ones 1."""

    def __init__(self, c: MoEConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(c, ranks)
        self.always = 0 if ranks.attention_dp else c.n_shared_experts
        inner = (c.n_routed_experts + self.always) * c.moe_intermediate_size // ranks.tp
        self.experts = MLP(c.hidden_size, inner)
        if ranks.attention_dp:
            self.shared_experts = shared_experts(c, ranks)

    def routed(self, x: Tensor) -> Tensor:
        c = self.config
        weights, ids = self.gate(x)
        inner = self.experts.by_kernel(x)
        if inner is not None and self.gate.fused and self.ranks.ep == 1:
            count = c.n_routed_experts + self.always
            inner = weigh_experts(inner, weights, ids, count, self.always)
            return inner @ self.experts.down_proj
        every = weights.new_zeros(*weights.shape[:-1], c.n_routed_experts).scatter(
            -1, ids.long(), weights
        )
        if (ep := self.ranks.ep) > 1:
            # Rank r has group r % ep. Not written as `rank % ep`, which the compiler would fold.
            groups = every.unflatten(-1, (ep, -1))
            if self.always:  # own experts are ep times as wide as a shared one's part
                groups = groups.repeat_interleave(ep, dim=-1)
            repeated = torch.cat([groups] * (self.ranks.tp // ep), dim=-2)
            every = repeated.index_select(-2, self.rank).squeeze(-2)
        if self.always:
            every = torch.cat([every, every.new_ones(*x.shape[:-1], self.always)], dim=-1)
        if inner is None:
            gate, up = (x @ self.experts.gate_up_proj).chunk(2, dim=-1)
            inner = F.silu(gate) * up
        inner = inner.unflatten(-1, (every.shape[-1], -1))
        return cast(inner * every[..., None], x.dtype).flatten(-2) @ self.experts.down_proj


class GatheredMoE(MoE):
    """Many experts, of which only the chosen ones are read.

    For a CPU an op reads them (`PackedExperts`, else `ExpertRows`). For a GPU an op does so after
    `use_kernels`, unless the number of tokens is unbounded. Otherwise the weights are gathered for
    each token.
    """

    by_kernels = ("gate_up_proj", "down_proj")  # the op's weights

    def __init__(self, c: MoEConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(c, ranks)
        experts = c.n_routed_experts // ranks.ep
        inner = c.moe_intermediate_size * ranks.ep // ranks.tp
        self.gate_up_proj = parameter(experts, c.hidden_size, 2 * inner)
        self.down_proj = parameter(experts, inner, c.hidden_size)
        self.shared_experts = shared_experts(c, ranks)

    def join_shared(self) -> None:
        """Make the shared expert the last one of the stack, which every token chooses."""
        for name in ("gate_up_proj", "down_proj"):
            experts, *shape = self.get_parameter(name).shape
            held = parameter(experts + 1, *shape, dtype=self.get_parameter(name).dtype)
            setattr(self, name, held)
        self.shared_experts, self.gate.always = None, 1

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x)
        if (ep := self.ranks.ep) > 1:
            experts = self.config.n_routed_experts // ep
            own = (self.rank - ids // experts) % ep == 0
            ids = torch.where(own, ids % experts, NOBODY)
        tokens = math.prod(x.shape[:-1])  # symbolic while a prompt's chunk is traced
        known = isinstance(tokens, int)
        if not self.kernels or not (known or self.most):
            return self.gathered(x, weights, ids)
        most = tokens if known else (self.most or 0) * self.ranks.serving
        flat = [each.flatten(0, -2) for each in (x, weights, ids.int())]
        if most <= self.piece and (known or not self.padded):
            return self.chosen(*flat, most=0 if known else most).reshape(x.shape)
        return self.in_pieces(*flat, most=most).reshape(x.shape)

    @property
    def piece(self) -> int:
        """Return the number of tokens that go to the op at a time."""
        return PADDED_TOKENS if self.padded else MAX_TOKENS

    def chosen(self, x: Tensor, weights: Tensor, ids: Tensor, *, most: int = 0) -> Tensor:
        """Call the op for at most `piece` tokens: x [N, E], weights, ids [N, k] -> [N, E].

        most: the bound of N, if N is symbolic.
        """
        (gate_up, *scales), (down, *others) = map(parts_of, (self.gate_up_proj, self.down_proj))
        every = (*scales, None, None)[:2], (*others, None, None)[:2]
        return moe(x, weights, ids, gate_up, down, *every[0], *every[1], most)

    def in_pieces(self, *operands: Tensor, most: int) -> Tensor:
        """Split many tokens into pieces for the op.

        A symbolic number of tokens is padded with copies of the first one, to `most`.
        """
        tokens = operands[0].shape[0]
        if not isinstance(tokens, int):
            operands = tuple(torch.cat([x, x[:1].expand(most, -1)])[:most] for x in operands)
        pieces = zip(*(each.split(self.piece) for each in operands), strict=True)
        return torch.cat([self.chosen(*piece) for piece in pieces])[:tokens]

    def gathered(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if isinstance(self.gate_up_proj, PackedExperts):
            return self.gate_up_proj.weighed(self.down_proj, x, weights, ids)
        if self.ranks.ep > 1:  # an expert of another group: take any of ours with weight 0
            weights, ids = torch.where(ids == NOBODY, 0.0, weights), ids.clamp(min=0)
        chosen = ids.flatten().long()
        rows = x.unsqueeze(-2).expand(*x.shape[:-1], ids.shape[-1], -1)
        y = self.each(rows.reshape(-1, 1, x.shape[-1]), chosen).reshape(*ids.shape, -1)
        return cast((y * weights[..., None]).sum(-2), x.dtype)

    def each(self, x: Tensor, ids: Tensor) -> Tensor:
        """Put every row through its expert: x [N, 1, E], ids [N] -> [N, 1, E]."""
        if isinstance(self.gate_up_proj, ExpertRows):
            return self.gate_up_proj.through(self.down_proj, x.flatten(0, 1), ids)[:, None]
        gate_up = cast(self.gate_up_proj.index_select(0, ids), x.dtype)
        gate, up = (x @ gate_up).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ cast(self.down_proj.index_select(0, ids), x.dtype)


def shared_experts(c: MoEConfig, ranks: Ranks) -> MLP | None:
    inner = c.n_shared_experts * c.moe_intermediate_size // ranks.parts
    return MLP(c.hidden_size, inner) if inner else None


def feed_forward(c: MoEConfig, layer: int, ranks: Ranks = ALONE) -> nn.Module:
    if not c.is_moe(layer):
        return MLP(c.hidden_size, c.intermediate_size // ranks.parts)
    return DenseMoE(c, ranks) if c.n_routed_experts <= DENSE_EXPERTS else GatheredMoE(c, ranks)
