"""The plain model: Qwen3.5 with its MTP module; delta rules run in chunks of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.plain import (
    Block,
    PlainCausalLM,
    PlainDecoderLayer,
    PlainGroupedAttention,
    PlainMLP,
    PlainMTPModule,
    PlainRMSNorm,
    PlainTrunk,
    weigh_by_expert,
)
from mtpbuild.builder.models.qwen3_5.config import Qwen35Config

CHUNK = 64  # tokens of a delta rule that are computed together


class PlainUnitRMSNorm(PlainRMSNorm):
    """A norm whose factor is 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1 + self.weight.float())).type_as(x)


class PlainGatedAttention(PlainGroupedAttention):
    """Grouped-query attention with a gate beside each head's query, for the head's output."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__(c)
        E, H, D = c.hidden_size, c.num_attention_heads, c.head_dim
        self.q_norm = PlainUnitRMSNorm(D, c.rms_norm_eps)
        self.k_norm = PlainUnitRMSNorm(D, c.rms_norm_eps)
        self.q_proj = nn.Linear(E, 2 * H * D, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        D = self.config.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * D)).split(D, dim=-1)
        k, v = (p(x).unflatten(-1, (-1, D)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        q = self.rotate_heads(self.q_norm(q).transpose(1, 2), cos, sin)
        k = self.rotate_heads(self.k_norm(k), cos, sin)
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        o = self.attend(q, k, v, None, is_causal=True, scale=self.scale)
        o = o.transpose(1, 2).flatten(2)
        return self.o_proj(o * gate.flatten(2).sigmoid())


class PlainGatedDelta(nn.Module):
    """The gated delta rule (arXiv:2412.06464), written out as it is defined."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.config, E, H = c, c.hidden_size, c.linear_num_value_heads
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

    def project(self, name: str, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, f"in_proj_{name}")(x)
        return y

    def projected(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values side by side, then z, b and a."""
        if not self.config.packed:
            return [self.project(name, x) for name in ("qkv", "z", "b", "a")]
        c = self.config
        group = c.linear_num_value_heads // c.linear_num_key_heads
        K, V, heads = c.linear_key_head_dim, c.linear_value_head_dim, (c.linear_num_key_heads, -1)
        qkvz = self.project("qkvz", x).unflatten(-1, heads).split([K, K, group * V, group * V], -1)
        b, a = self.project("ba", x).unflatten(-1, heads).chunk(2, dim=-1)
        q, k, v, z, b, a = (part.flatten(-2) for part in (*qkvz, b, a))
        return [torch.cat([q, k, v], -1), z, b, a]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, T = self.config, x.shape[1]
        H, K, V = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        qkv, z, b, a = self.projected(x)
        mixed = F.silu(self.conv1d(qkv.mT)[..., :T].mT)
        q, k, v = mixed.split([c.delta_keys, c.delta_keys, c.delta_values], dim=-1)
        q, k = (heads(each, K, H) for each in (q, k))
        q = q / K**0.5
        v, decay = heads(v, V, H, normed=False), -self.A_log.exp() * F.softplus(a + self.dt_bias)
        S, outputs = x.new_zeros(x.shape[0], H, K, V), []
        tokens = (each.transpose(1, 2).split(CHUNK, dim=2) for each in (q, k, v, decay, b))
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
    beta, own = b.sigmoid()[..., None], total.exp()
    system = (beta * (k @ k.mT) * since).tril(-1)
    right = beta * (v - own * (k @ S))
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    o = own * (q @ S) + (q @ k.mT * since) @ u
    left = (total[..., -1:, :] - total).exp()
    return own[..., -1:, :] * S + (left * k).mT @ u, o


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
        self.config, E = c, c.hidden_size
        self.gate = nn.Linear(E, c.n_routed_experts, bias=False)
        each = (PlainMLP(E, c.moe_intermediate_size) for _ in range(c.n_routed_experts))
        self.experts = nn.ModuleList(each)
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


class PlainQwen35Layer(PlainDecoderLayer):
    def __init__(self, c: Qwen35Config, block: Block) -> None:
        nn.Module.__init__(self)
        self.input_layernorm = PlainUnitRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.kind = "linear_attn" if isinstance(block[0], PlainGatedDelta) else "self_attn"
        setattr(self, self.kind, block[0])
        self.post_attention_layernorm = PlainUnitRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = block[1]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + getattr(self, self.kind)(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainQwen35Module(PlainMTPModule):
    """The checkpoint's `mtp.`: the join, one layer, and a norm."""

    def __init__(self, c: Qwen35Config, block: Block) -> None:
        nn.Module.__init__(self)
        self.pre_fc_norm_embedding = PlainUnitRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_hidden = PlainUnitRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList([PlainQwen35Layer(c, block)])
        self.norm = PlainUnitRMSNorm(c.hidden_size, c.rms_norm_eps)

    def own(self, name: str) -> None:
        """Return None: the module has no embedding and no head of its own."""

    def draft(self, embedding: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        halves = [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)]
        y: Tensor = self.layers[0](self.fc(torch.cat(halves, dim=-1)), cos, sin)
        return y

    def normed(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


class PlainQwen35(PlainCausalLM):
    config: Qwen35Config

    def __init__(self, config: Qwen35Config) -> None:
        c = config

        def block(layer: int) -> Block:
            delta = layer < c.num_hidden_layers and c.delta_layers[layer]
            first = PlainGatedDelta(c) if delta else PlainGatedAttention(c)
            if c.is_moe(layer):
                return first, PlainQwen35MoE(c)
            return first, PlainMLP(c.hidden_size, c.intermediate_size)

        super().__init__(c, block, c.rotary_dim)

    def make_layer(self, block: Block) -> PlainDecoderLayer:
        return PlainQwen35Layer(self.config, block)

    def make_module(self, block: Block, j: int) -> PlainMTPModule:
        return PlainQwen35Module(self.config, block)

    def join(self, trunk: list[PlainDecoderLayer], modules: list[PlainMTPModule]) -> PlainTrunk:
        for module in modules:  # at most one; set by hand, as `mtp` is a method
            self._modules["mtp"] = module
        model = PlainTrunk(self.config, trunk)
        model.norm = PlainUnitRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        return model

    def module(self, k: int) -> PlainMTPModule:
        module = self._modules["mtp"]
        assert isinstance(module, PlainQwen35Module)
        return module
