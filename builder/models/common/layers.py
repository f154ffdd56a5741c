"""DeepSeek-V3's blocks as a step sees them: absorbed attention, latent caches, weights [in, out].

Shapes: B slots, T tokens, E hidden size, H heads, S cache rows, C = kv_lora_rank + rope dim.
`deepseek_v3/reference.py` is the plain counterpart, `deepseek_v3/weights.py` says where each
parameter comes from.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.blocks import ExpertBlocks, parts_of
from mtpbuild.builder.models.common.collectives import (
    all_reduce,
    every_rank,
    own_sum,
    rank_constant,
)
from mtpbuild.builder.models.common.precision import cast
from mtpbuild.builder.models.common.rope import inverse_frequencies, softmax_scale, table_scale
from mtpbuild.builder.models.common.share import WHOLE, Share
from mtpbuild.builder.models.deepseek_v3.config import ModelConfig
from mtpbuild.plugins import kv_write, mla_attention, moe, rope
from mtpbuild.plugins.mla_attention.op import floored_softmax
from mtpbuild.plugins.moe.op import MAX_TOKENS


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


@dataclass(frozen=True)
class Rows:
    """Where a pass's tokens stand: their angles, and which cache rows they see and fill."""

    cos: Tensor  # [B, T, qk_rope_head_dim / 2]
    sin: Tensor
    base: Tensor  # [B] rows before it are seen by all tokens; fresh rows are written from it on
    expand: bool = False  # many tokens: attend over per-head keys and values, made for the pass


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = parameter(size), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rope(nn.Module):
    """Angles from positions; computed, not looked up, so no table bounds the sequence."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.scale = table_scale(c.rope)
        frequencies = inverse_frequencies(c.rope, c.qk_rope_head_dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.inv_freq: Tensor

    def forward(self, start: Tensor, tokens: int, base: Tensor | None = None) -> Rows:
        """Tokens at positions start .. start + tokens - 1 of each slot; base defaults to start."""
        positions = start[:, None] + torch.arange(tokens, device=start.device)
        angles = positions[..., None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return Rows(cos, sin, start if base is None else base)


class Attention(nn.Module):
    """Multi-head latent attention, absorbed (spec/deepseek-v3.md section 2.2)."""

    floor = True  # under a prompt's softmax; a GPU does not need it

    def __init__(self, c: ModelConfig, share: Share = WHOLE) -> None:
        super().__init__()
        H, n, R = c.num_attention_heads // share.parts, c.qk_nope_head_dim, c.qk_rope_head_dim
        self.config, self.heads, self.scale = c, H, softmax_scale(c)
        queries = H * (n + R)
        if c.q_lora_rank is None:
            self.qkv_a_proj = parameter(c.hidden_size, queries + c.cache_dim)
        else:
            self.qkv_a_proj = parameter(c.hidden_size, c.q_lora_rank + c.cache_dim)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
            self.q_b_proj = parameter(c.q_lora_rank, queries)  # all heads' nope, then all heads' pe
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.w_uk = parameter(H, n, c.kv_lora_rank)
        self.w_uv = parameter(H, c.kv_lora_rank, c.v_head_dim)
        self.o_proj = parameter(H * c.v_head_dim, c.hidden_size)

    def project(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """x [B, T, E] -> query input [B, T, ..], and cache rows [B, 1, T, C] (latent, key)."""
        c = self.config
        a = x @ self.qkv_a_proj
        width = a.shape[-1] - c.cache_dim
        q, latent, k_pe = a.split([width, c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        k_pe = rope(k_pe, rows.cos, rows.sin, 1, c.rope_interleave)
        return q, torch.cat([self.kv_a_layernorm(latent), k_pe], dim=-1)[:, None]

    def queries(self, q: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Query input [B, T, ..] -> [B, H, T, qk_nope_head_dim] and [B, H, T, qk_rope_head_dim]."""
        c, (B, T, _) = self.config, q.shape
        if c.q_lora_rank is not None:
            q = self.q_a_layernorm(q) @ self.q_b_proj
        H = self.heads
        q_nope, q_pe = q.split([H * c.qk_nope_head_dim, H * c.qk_rope_head_dim], dim=-1)
        q_pe = rope(q_pe, rows.cos, rows.sin, H, c.rope_interleave)
        q_nope, q_pe = q_nope.reshape(B, T, H, -1), q_pe.reshape(B, T, H, -1)
        return q_nope.transpose(1, 2), q_pe.transpose(1, 2)

    def attend(
        self, q: Tensor, rows: Rows, cache: Tensor, fresh: Tensor, base: Tensor, first: Tensor
    ) -> Tensor:
        """Query input [B, T, ..] -> [B, T, E]; `mla_attention` explains base and first [B]."""
        c = self.config
        q_nope, q_pe = self.queries(q, rows)
        if rows.expand:
            o = self.expanded(q_nope, q_pe, cache, base)
        else:
            q = torch.cat([q_nope @ self.w_uk, q_pe], dim=-1)
            o = mla_attention(q, cache, fresh, base, first, self.scale, c.kv_lora_rank) @ self.w_uv
        return o.transpose(1, 2).flatten(2) @ self.o_proj

    def expanded(self, q_nope: Tensor, q_pe: Tensor, cache: Tensor, base: Tensor) -> Tensor:
        """The non-absorbed form over a cache that the pass's rows are written to: [B, H, T, v].

        Expanding S rows costs 2 S H r (n + v) operations and saves 2 S T H (2 r - n - v) in the
        products: it pays from T = 51 (deepseek-tiny) or 170 (DeepSeek-V3) tokens on.
        """
        c, T, S = self.config, q_nope.shape[2], cache.shape[2]
        latent, k_pe = cache.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)  # [B, 1, S, ..]
        k_nope, v = latent @ self.w_uk.mT, latent @ self.w_uv  # [B, H, S, ..]
        k = torch.cat([k_nope, k_pe.expand(-1, self.heads, -1, -1)], dim=-1)
        q = torch.cat([q_nope, q_pe], dim=-1) * self.scale
        last = base[:, None] + torch.arange(T, device=base.device)
        seen = torch.arange(S, device=base.device) <= last[:, None, :, None]  # [B, 1, T, S]
        mask = torch.where(seen, 0.0, float("-inf"))  # equal in all layers: the passes leave one
        scores = q @ k.mT + mask
        p = floored_softmax(scores) if self.floor else scores.softmax(-1)
        return cast(p, v.dtype) @ v


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = parameter(hidden, 2 * inner)
        self.down_proj = parameter(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x @ self.gate_up_proj).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.down_proj


class Gate(nn.Module):
    """Sigmoid scores in fp32; the bias selects, the unbiased scores weigh."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.weight = parameter(c.hidden_size, c.n_routed_experts)
        self.e_score_correction_bias = parameter(c.n_routed_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [.., E] -> weights and ids of the chosen experts, both [.., num_experts_per_tok]."""
        c = self.config
        scores = (x.float() @ self.weight.float()).sigmoid()
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
        return weights * c.routed_scaling_factor, ids


class MoE(nn.Module):
    """A rank of several computes a part of the sum.

    With attention-DP all of it, of its own tokens: routed experts see those of all ranks, so ranks
    must have equally many.
    """

    def __init__(self, c: ModelConfig, share: Share) -> None:
        super().__init__()
        self.config, self.share = c, share
        self.gate = Gate(c)
        self.shared_experts: MLP | None = None  # those that `routed` leaves out
        if share.ep > 1 or share.attention_dp:
            self.rank = rank_constant()

    def forward(self, x: Tensor) -> Tensor:
        if self.share.attention_dp:
            every = every_rank(x, self.rank, self.share.tp)
            y = own_sum(self.routed(every), self.rank)
        else:
            y = self.routed(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def routed(self, x: Tensor) -> Tensor:
        """x [.., E] -> [.., E]."""
        raise NotImplementedError


class DenseMoE(MoE):
    """Few experts: all are computed in two products, the unchosen weigh 0, shared ones weigh 1."""

    def __init__(self, c: ModelConfig, share: Share = WHOLE) -> None:
        super().__init__(c, share)
        self.always = 0 if share.attention_dp else c.n_shared_experts
        inner = (c.n_routed_experts + self.always) * c.moe_intermediate_size // share.tp
        self.experts = MLP(c.hidden_size, inner)
        if share.attention_dp:
            self.shared_experts = shared_experts(c, share)

    def routed(self, x: Tensor) -> Tensor:
        c = self.config
        weights, ids = self.gate(x)
        every = weights.new_zeros(*weights.shape[:-1], c.n_routed_experts)
        every = every.scatter(-1, ids, weights)
        if (ep := self.share.ep) > 1:
            # Rank r's is group r % ep; not by `rank % ep`, which the compiler would fold.
            groups = every.unflatten(-1, (ep, -1))
            if self.always:  # own experts are ep times as wide as a shared one's part
                groups = groups.repeat_interleave(ep, dim=-1)
            repeated = torch.cat([groups] * (self.share.tp // ep), dim=-2)
            every = repeated.index_select(-2, self.rank).squeeze(-2)
        if self.always:
            every = torch.cat([every, every.new_ones(*x.shape[:-1], self.always)], dim=-1)
        gate, up = (x @ self.experts.gate_up_proj).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).unflatten(-1, (every.shape[-1], -1))
        return cast(inner * every[..., None], x.dtype).flatten(-2) @ self.experts.down_proj


class GatheredMoE(MoE):
    """Many experts: only the chosen ones' weights are read.

    By an op if `use_kernels` said so, where a step has few tokens and their number is fixed; else
    the weights are gathered for each token.
    """

    kernels = False
    chunk: int | None = None  # tokens of a prompt's chunk at most, if it goes by the op too

    def __init__(self, c: ModelConfig, share: Share = WHOLE) -> None:
        super().__init__(c, share)
        experts, inner = len(share.experts(c)), share.expert_inner(c)
        self.gate_up_proj = parameter(experts, c.hidden_size, 2 * inner)
        self.down_proj = parameter(experts, inner, c.hidden_size)
        self.shared_experts = shared_experts(c, share)

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x)
        if (ep := self.share.ep) > 1:  # another group's expert: any of ours, which weighs 0
            experts = len(self.share.experts(self.config))
            own = (self.rank - ids // experts) % ep == 0
            weights, ids = torch.where(own, weights, 0.0), ids % experts
        few = is_few(math.prod(x.shape[:-1]))
        if not self.kernels or not (few or self.chunk):
            return self.gathered(x, weights, ids)
        flat = [each.flatten(0, -2) for each in (x, weights, ids.int())]
        return (self.chosen(*flat) if few else self.in_pieces(*flat)).reshape(x.shape)

    def chosen(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Of as many tokens as the op takes: x [N, E] -> [N, E]."""
        (gate_up, *scales), (down, *others) = map(parts_of, (self.gate_up_proj, self.down_proj))
        return moe(x, weights, ids, gate_up, down, *scales, *others)

    def in_pieces(self, *operands: Tensor) -> Tensor:
        """Of more, so many at a time; an open number is filled up with the first token."""
        tokens = operands[0].shape[0]
        if not isinstance(tokens, int):
            assert self.chunk is not None
            most = self.chunk
            filled = (torch.cat([each, each[:1].expand(most, -1)])[:most] for each in operands)
            operands = tuple(filled)
        pieces = zip(*(each.split(MAX_TOKENS) for each in operands), strict=True)
        return torch.cat([self.chosen(*piece) for piece in pieces])[:tokens]

    def gathered(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        chosen = ids.flatten()
        k = ids.shape[-1]
        rows = x.unsqueeze(-2).expand(*x.shape[:-1], k, -1).reshape(-1, 1, x.shape[-1])
        y = self.each(rows, chosen).reshape(*ids.shape, -1)
        return cast((y * weights[..., None]).sum(-2), x.dtype)

    def each(self, x: Tensor, ids: Tensor) -> Tensor:
        """Every row through its expert: x [N, 1, E], ids [N] -> [N, 1, E]."""
        if isinstance(self.gate_up_proj, ExpertBlocks):
            return self.gate_up_proj.through(self.down_proj, x.flatten(0, 1), ids)[:, None]
        gate_up = cast(self.gate_up_proj.index_select(0, ids), x.dtype)
        gate, up = (x @ gate_up).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ cast(self.down_proj.index_select(0, ids), x.dtype)


def shared_experts(c: ModelConfig, share: Share) -> MLP | None:
    inner = c.n_shared_experts * c.moe_intermediate_size // share.parts
    return MLP(c.hidden_size, inner) if inner else None


def is_few(tokens: int) -> bool:
    """A prompt's chunk is a symbol while it is traced."""
    return isinstance(tokens, int) and tokens <= MAX_TOKENS


def use_kernels(model: nn.Module, chunk: int | None = None) -> None:
    """For a GPU: kernels for every op, no floor. chunk: of prompts, if they go by kernels too."""
    for module in model.modules():
        if isinstance(module, GatheredMoE):
            module.kernels, module.chunk = True, chunk
        if isinstance(module, Attention):
            module.floor = False


DENSE_EXPERTS = 16  # up to here computing all experts is faster than gathering the chosen ones


def feed_forward(c: ModelConfig, layer: int, share: Share = WHOLE) -> nn.Module:
    if not c.is_moe(layer):
        return MLP(c.hidden_size, c.intermediate_size // share.parts)
    return DenseMoE(c, share) if c.n_routed_experts <= DENSE_EXPERTS else GatheredMoE(c, share)


class DecoderLayer(nn.Module):
    """Pre-norm block: x += attention(norm(x)); x += feed_forward(norm(x)).

    A rank of several computes a part of both terms, and what is added is the ranks' sum; with
    attention-DP it computes both, and `MoE` meets the others.
    """

    def __init__(self, c: ModelConfig, layer: int, share: Share = WHOLE) -> None:
        super().__init__()
        self.share = share
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, share)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = feed_forward(c, layer, share)

    def forward(self, x: Tensor, cache: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """All T tokens attend; their rows are written from rows.base on. x [B, T, E]."""
        q, fresh = self.self_attn.project(self.input_layernorm(x), rows)
        cache = kv_write(cache, fresh, rows.base)
        first = torch.zeros_like(rows.base)
        return self.finish(x, q, rows, cache, fresh, rows.base, first), cache

    def fill(self, x: Tensor, cache: Tensor, rows: Rows) -> Tensor:
        """Only the cache rows: nobody reads the last layer's output while a prompt is filled in."""
        _, fresh = self.self_attn.project(self.input_layernorm(x), rows)
        return kv_write(cache, fresh, rows.base)

    def last(self, x: Tensor, cache: Tensor, rows: Rows, at: Tensor) -> tuple[Tensor, Tensor]:
        """As forward, but only token at[b] of each slot attends: -> [B, 1, E] and the cache."""
        q, fresh = self.self_attn.project(self.input_layernorm(x), rows)
        cache = kv_write(cache, fresh, rows.base)
        own = Rows(pick(rows.cos, at), pick(rows.sin, at), rows.base)
        return self.finish(pick(x, at), pick(q, at), own, cache, fresh, rows.base, at), cache

    def finish(
        self,
        x: Tensor,
        q: Tensor,
        rows: Rows,
        cache: Tensor,
        fresh: Tensor,
        base: Tensor,
        first: Tensor,
    ) -> Tensor:
        x = x + self.summed(self.self_attn.attend(q, rows, cache, fresh, base, first))
        return x + self.summed(self.mlp(self.post_attention_layernorm(x)))

    def summed(self, part: Tensor) -> Tensor:
        return part if self.share.parts == 1 else all_reduce(part)


def pick(x: Tensor, at: Tensor) -> Tensor:
    """x [B, T, ..] -> [B, 1, ..]: row at[b] of each slot."""
    return x.gather(1, at[:, None, None].expand(-1, 1, x.shape[-1]))
