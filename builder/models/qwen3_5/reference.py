"""The plain model: Qwen3.5 with its MTP module; delta rules run in chunks of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.plain import (
    PlainCausalLM,
    PlainGroupedAttention,
    PlainMLP,
    weigh_by_expert,
)
from mtpbuild.builder.models.qwen3_5.config import Qwen35Config

CHUNK = 64  # tokens of a delta rule that are computed together


class PlainGatedDelta(nn.Module):
    """The gated delta rule (arXiv:2412.06464), written out as it is defined."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.config = c
        E = c.hidden_size
        H = c.linear_num_value_heads
        projected = {"in_proj_qkv": c.channels, "in_proj_z": c.delta_values}
        projected |= {"in_proj_b": H, "in_proj_a": H}
        if c.packed:
            projected = {"in_proj_qkvz": c.channels + c.delta_values, "in_proj_ba": 2 * H}
        for name, size in projected.items():
            setattr(self, name, nn.Linear(E, size, bias=False))
        C, taps = c.channels, c.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(C, C, taps, groups=C, padding=taps - 1, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(H)), nn.Parameter(torch.zeros(H))
        self.norm = nn.RMSNorm(c.linear_value_head_dim, c.rms_norm_eps)
        self.out_proj = nn.Linear(c.delta_values, E, bias=False)

    def projected(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values side by side, then z, b and a."""
        if not self.config.packed:
            return [self.get_submodule(f"in_proj_{name}")(x) for name in ("qkv", "z", "b", "a")]
        c = self.config
        group = c.linear_num_value_heads // c.linear_num_key_heads
        K, V, heads = c.linear_key_head_dim, c.linear_value_head_dim, (c.linear_num_key_heads, -1)
        qkvz = (
            self.get_submodule("in_proj_qkvz")(x)
            .unflatten(-1, heads)
            .split([K, K, group * V, group * V], -1)
        )
        b, a = self.get_submodule("in_proj_ba")(x).unflatten(-1, heads).chunk(2, dim=-1)
        q, k, v, z, b, a = (part.flatten(-2) for part in (*qkvz, b, a))
        return [torch.cat([q, k, v], -1), z, b, a]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, T = self.config, x.shape[1]
        H, K, V = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        qkv, z, b, a = self.projected(x)
        mixed = F.silu(self.conv1d(qkv.mT)[..., :T].mT)
        q, k, v = mixed.split([c.delta_keys, c.delta_keys, c.delta_values], dim=-1)
        q, k = (heads(part, K, H) for part in (q, k))
        q = q / K**0.5
        v = heads(v, V, H, normed=False)
        decay = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        S = x.new_zeros(x.shape[0], H, K, V)
        outputs = []
        tokens = (part.transpose(1, 2).split(CHUNK, dim=2) for part in (q, k, v, decay, b))
        for chunk in zip(*tokens, strict=True):
            S, o = run_chunk(S, *chunk)
            outputs.append(o)
        o = self.norm(torch.cat(outputs, dim=2).transpose(1, 2)) * F.silu(z.unflatten(-1, (H, V)))
        return self.out_proj(o.flatten(2))


def run_chunk(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state [B, H, K, V] after C tokens, and their outputs [B, H, C, V].

    Token by token the rule is S = exp(decay) S + k u^T with u = sigmoid(b) (v - exp(decay) S^T k).
    Each u depends on those before it, so all of a chunk solve a triangular system.

    q, k: [B, H, C, K]; v: [B, H, C, V]; decay, b: [B, H, C].
    """
    total = decay.cumsum(-1)[..., None]  # since the chunk began
    since = (total - total.mT).tril().exp().tril()  # [i, j]: from token j to token i
    beta = b.sigmoid()[..., None]
    decayed = total.exp()
    system = (beta * (k @ k.mT) * since).tril(-1)
    right = beta * (v - decayed * (k @ S))
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    o = decayed * (q @ S) + (q @ k.mT * since) @ u
    left = (total[..., -1:, :] - total).exp()
    return decayed[..., -1:, :] * S + (left * k).mT @ u, o


def heads(x: Tensor, width: int, count: int, normed: bool = True) -> Tensor:
    """Split x [B, T, ..] into heads of `width`, and repeat each until there are `count` heads."""
    y = x.unflatten(-1, (-1, width))
    if normed:
        y = y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)
    return y.repeat_interleave(count // y.shape[2], dim=2)


class PlainQwen35MoE(nn.Module):
    """All routed experts, chosen by a softmax, and a shared one with a gate."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.config = c
        E = c.hidden_size
        self.gate = nn.Linear(E, c.n_routed_experts, bias=False)
        experts = (PlainMLP(E, c.moe_intermediate_size) for _ in range(c.n_routed_experts))
        self.experts = nn.ModuleList(experts)
        if inner := c.shared_expert_intermediate_size:
            self.shared_expert = PlainMLP(E, inner)
            self.shared_expert_gate = nn.Linear(E, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        weights, ids = scores.topk(self.config.num_experts_per_tok, dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen = torch.zeros_like(scores).scatter(-1, ids, weights)
        y = weigh_by_expert(self.experts, x, chosen)
        if not self.config.shared_expert_intermediate_size:
            return y
        return y + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)


class PlainQwen35(PlainCausalLM):
    config: Qwen35Config

    def __init__(self, c: Qwen35Config) -> None:
        def attention(layer: int) -> nn.Module:
            delta = layer < c.num_hidden_layers and c.delta_layers[layer]
            return PlainGatedDelta(c) if delta else PlainGroupedAttention(c)

        super().__init__(c, attention, c.rotary_dim)

    def make_feed_forward(self, layer: int) -> nn.Module:
        return (
            PlainQwen35MoE(self.config)
            if self.config.is_moe(layer)
            else super().make_feed_forward(layer)
        )
