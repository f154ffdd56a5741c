"""The model in a form that trains fast: fused projections, all experts computed at once."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of the model, named as in the Hugging Face config."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 384
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 20
    first_k_dense_replace: int = 18
    num_attention_heads: int = 8
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float = 4.0
    rope_original_positions: int = 512
    max_position_embeddings: int = 2048
    num_nextn_predict_layers: int = 3

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def linear(rows: int, cols: int, std: float, blocks: tuple[int, ...] = ()) -> nn.Parameter:
    """Make a weight [rows, cols]; `blocks` are the row counts of the matrices fused in it."""
    weight = nn.Parameter(torch.randn(rows, cols) * std)
    weight.blocks = blocks or (rows,)  # type: ignore[attr-defined]
    return weight


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * self.weight).to(x.dtype)


def yarn_frequencies(shape: Shape) -> Tensor:
    """Return YaRN's inverse frequencies [qk_rope_head_dim / 2] (beta_fast 32, beta_slow 1)."""
    dim, base = shape.qk_rope_head_dim, shape.rope_theta
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def correction(rotations: float) -> float:
        wavelengths = shape.rope_original_positions / (rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(base))

    low = max(math.floor(correction(32)), 0)
    high = min(math.ceil(correction(1)), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1).double()
    return (plain / shape.rope_factor * ramp + plain * (1 - ramp)).float()


def softmax_scale(shape: Shape) -> float:
    mscale = 0.1 * math.log(shape.rope_factor) + 1.0 if shape.rope_factor > 1 else 1.0
    return float(shape.qk_head_dim**-0.5 * mscale**2)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of x [B, T, H, R]; return evens, then odds, for q and k alike."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention with explicit scores: on a CPU its backward beats the flash kernel's."""
    scores = (q @ k.transpose(-1, -2)).float() + mask  # [B, H, T, T]
    return scores.softmax(-1).to(v.dtype) @ v


class Attention(nn.Module):
    """MLA in the non-absorbed form; `mask` makes it causal."""

    def __init__(self, s: Shape, std: float, out_std: float) -> None:
        super().__init__()
        self.s, self.scale = s, softmax_scale(s)
        heads, latent = s.num_attention_heads, s.kv_lora_rank + s.qk_rope_head_dim
        self.a_proj = linear(
            s.q_lora_rank + latent, s.hidden_size, std, (s.q_lora_rank, latent)
        )  # q_a_proj, then kv_a_proj_with_mqa
        self.q_norm = RMSNorm(s.q_lora_rank, s.rms_norm_eps)
        self.kv_norm = RMSNorm(s.kv_lora_rank, s.rms_norm_eps)
        self.q_b = linear(heads * s.qk_head_dim, s.q_lora_rank, std)
        self.kv_b = linear(heads * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank, std)
        self.o_proj = linear(s.hidden_size, heads * s.v_head_dim, out_std)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute scaled queries, keys and values [B, H, T, D] of x [B, T, hidden]."""
        s, (b, t, _) = self.s, x.shape
        sizes = [s.q_lora_rank, s.kv_lora_rank, s.qk_rope_head_dim]
        q_a, c, k_pe = torch.split(F.linear(x, self.a_proj), sizes, -1)
        q = F.linear(self.q_norm(q_a), self.q_b).view(b, t, s.num_attention_heads, -1)
        kv = F.linear(self.kv_norm(c), self.kv_b).view(b, t, s.num_attention_heads, -1)
        q_nope, q_pe = torch.split(q, [s.qk_nope_head_dim, s.qk_rope_head_dim], -1)
        k_nope, v = torch.split(kv, [s.qk_nope_head_dim, s.v_head_dim], -1)
        k_pe = rope(k_pe.unsqueeze(2), cos, sin).expand(b, t, s.num_attention_heads, -1)
        q = torch.cat([q_nope, rope(q_pe, cos, sin)], -1).transpose(1, 2)
        k = torch.cat([k_nope, k_pe], -1).transpose(1, 2)
        return q * self.scale, k, v.transpose(1, 2)

    def output(self, attended: Tensor) -> Tensor:
        """Project attended values [B, H, T, D] to [B, T, hidden]."""
        return F.linear(attended.transpose(1, 2).flatten(2), self.o_proj)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        return self.output(attend(q, k, v, mask))


class DenseFFN(nn.Module):
    def __init__(self, hidden: int, size: int, std: float, out_std: float) -> None:
        super().__init__()
        self.gate_up = linear(2 * size, hidden, std, (size, size))
        self.down = linear(hidden, size, out_std)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


class MoE(nn.Module):
    """All experts, with weight 0 if not chosen; the shared expert is the last."""

    def __init__(self, s: Shape, std: float, out_std: float) -> None:
        super().__init__()
        self.s, size, count = s, s.moe_intermediate_size, s.n_routed_experts + 1
        self.router = nn.Parameter(torch.randn(s.n_routed_experts, s.hidden_size) * 0.02)
        self.gate = linear(count * size, s.hidden_size, std, (size,) * count)
        self.up = linear(count * size, s.hidden_size, std, (size,) * count)
        self.down = linear(count * size, s.hidden_size, out_std, (size,) * count)  # transposed
        self.register_buffer("bias", torch.zeros(s.n_routed_experts))
        self.register_buffer("load", torch.zeros(s.n_routed_experts), persistent=False)
        self.bias: Tensor
        self.load: Tensor

    def weights(self, x: Tensor) -> Tensor:
        """Return experts' weights [N, E] of x [N, hidden]: grouped top-k; the bias only selects."""
        s = self.s
        with torch.autocast(x.device.type, enabled=False):
            score = F.linear(x.float(), self.router).sigmoid()
        biased = (score.detach() + self.bias).view(-1, s.n_group, s.n_routed_experts // s.n_group)
        group = biased.topk(2, -1).values.sum(-1).topk(s.topk_group, -1).indices
        keep = torch.zeros_like(biased[..., 0]).scatter(1, group, 1.0).unsqueeze(-1)
        masked = torch.where(keep > 0, biased, -torch.inf).flatten(1)
        chosen = masked.topk(s.num_experts_per_tok, -1).indices
        mask = torch.zeros_like(masked).scatter(1, chosen, 1.0)
        if self.training:
            self.load.add_(mask.sum(0))
        weight = score * mask
        return weight / (weight.sum(-1, keepdim=True) + 1e-20) * s.routed_scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight = self.weights(flat)
        weight = torch.cat([weight, torch.ones_like(weight[:, :1])], -1)
        hidden = F.silu(F.linear(flat, self.gate)) * F.linear(flat, self.up)
        hidden = hidden.view(len(flat), weight.shape[1], -1) * weight.unsqueeze(-1).to(hidden.dtype)
        return (hidden.flatten(1) @ self.down).view_as(x)

    @torch.no_grad()
    def rebalance(self, rate: float) -> None:
        """Apply the DeepSeek-V3 paper's sign rule: overloaded experts lose bias, others gain."""
        self.bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Block(nn.Module):
    def __init__(self, s: Shape, moe: bool) -> None:
        super().__init__()
        std = 0.5 * s.hidden_size**-0.5
        out_std = std / math.sqrt(2 * s.num_hidden_layers)
        self.input_norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.attention = Attention(s, std, out_std)
        self.post_norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        sizes = s.hidden_size, s.intermediate_size
        self.ffn = MoE(s, std, out_std) if moe else DenseFFN(*sizes, std, out_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin, mask)
        return x + self.ffn(self.post_norm(x))


class MTPModule(nn.Module):
    """One more block, on the hidden state of slot p and the embedding of token p + k."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.enorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.hnorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.eh_proj = linear(s.hidden_size, 2 * s.hidden_size, s.hidden_size**-0.5)
        self.block = Block(s, moe=True)
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)

    def forward(
        self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        y = self.block(self.join(hidden, embedded), cos, sin, mask)
        return self.norm(y)

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return F.linear(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1), self.eh_proj)


class TrainedModel(nn.Module):
    """The interface of a model; MTP modules share the trunk's embedding and head."""

    shape: Any
    layers: Any
    mtp: Any
    norm: Any
    embed: nn.Parameter
    head: nn.Parameter
    cos: Tensor
    sin: Tensor

    def trunk(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Compute the hidden states [B, T, hidden], after model.norm, of tokens [B, T]."""
        raise NotImplementedError

    def draft(self, index: int, hidden: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Run module `index` on hidden [B, T, hidden] and tokens [B, T], from index + 1 on."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)

    def moes(self) -> list[MoE]:
        return [m for m in self.modules() if isinstance(m, MoE)]


class Model(TrainedModel):
    """DeepSeek-V3's architecture."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = self.shape = shape
        self.embed = nn.Parameter(torch.randn(s.vocab_size, s.hidden_size) * 0.5)
        dense = s.first_k_dense_replace
        self.layers = nn.ModuleList(Block(s, moe=i >= dense) for i in range(s.num_hidden_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mtp = nn.ModuleList(MTPModule(s) for _ in range(s.num_nextn_predict_layers))
        self.head = nn.Parameter(torch.randn(s.vocab_size, s.hidden_size) * 0.02)
        angles = torch.outer(torch.arange(s.max_position_embeddings).float(), yarn_frequencies(s))
        self.register_buffer("cos", angles.cos().unsqueeze(1), persistent=False)  # [P, 1, R/2]
        self.register_buffer("sin", angles.sin().unsqueeze(1), persistent=False)

    def trunk(self, tokens: Tensor, mask: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = F.embedding(tokens, self.embed)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def draft(self, index: int, hidden: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        embedded = F.embedding(tokens, self.embed)
        return self.mtp[index](hidden, embedded, cos, sin, mask)
