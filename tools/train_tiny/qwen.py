"""Qwen3.5's architecture in a form that trains fast: three delta-rule layers, then a full one."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from delta import delta_outputs, recurrent
from model import DenseFFN, TrainedModel, attend, linear


@dataclass(frozen=True)
class QwenShape:
    """The sizes of the model, named as in the Hugging Face config."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 384
    num_hidden_layers: int = 20
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5
    max_position_embeddings: int = 2048
    mtp_num_hidden_layers: int = 1

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def rotated(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


class OffsetNorm(nn.Module):
    """A norm that multiplies by 1 + weight, as all of Qwen3.5's norms except the gated one do."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * (1 + self.weight)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the first R entries of x [B, T, H, D]; cos is [T, 1, R / 2]."""
    half = cos.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(part.to(x.dtype) for part in rotated), rest], -1)


class Attention(nn.Module):
    """Gated attention; rows of `proj` are [query ; gate] of each head, keys, values."""

    def __init__(self, s: QwenShape, std: float, out_std: float) -> None:
        super().__init__()
        self.s, size = s, s.head_dim
        self.sizes = [2 * s.num_attention_heads * size, *[s.num_key_value_heads * size] * 2]
        blocks = (*[size] * 2 * s.num_attention_heads, *self.sizes[1:])
        self.proj = linear(sum(self.sizes), s.hidden_size, std, blocks)
        self.q_norm = OffsetNorm(size, s.rms_norm_eps)
        self.k_norm = OffsetNorm(size, s.rms_norm_eps)
        self.o_proj = linear(s.hidden_size, s.num_attention_heads * size, out_std)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Compute scaled queries, keys and values [B, H, T, D], and gates [B, T, H D]."""
        s, (b, t, _) = self.s, x.shape
        q, k, v = torch.split(F.linear(x, self.proj), self.sizes, -1)
        q, gate = q.view(b, t, s.num_attention_heads, -1).chunk(2, -1)
        k, v = (y.view(b, t, s.num_key_value_heads, -1) for y in (k, v))
        q = rotate(self.q_norm(q), cos, sin) * s.head_dim**-0.5
        k = rotate(self.k_norm(k), cos, sin)
        shared = s.num_attention_heads // s.num_key_value_heads
        k, v = (y.transpose(1, 2).repeat_interleave(shared, 1) for y in (k, v))
        return q.transpose(1, 2), k, v, gate.flatten(2)

    def output(self, attended: Tensor, gate: Tensor) -> Tensor:
        """Project attended values [B, H, T, D], gated, to [B, T, hidden]."""
        return F.linear(attended.transpose(1, 2).flatten(2) * gate.sigmoid(), self.o_proj)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, links: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, cos, sin)
        return self.output(attend(q, k, v, mask), gate)


def links(mask: Tensor, kernel: int) -> Tensor:
    """Return [B, T, kernel]: 1 where slot t sees slot t - s, from a mask [B, 1, T, past + T]."""
    t, past = mask.shape[2], mask.shape[3] - mask.shape[2]
    padded = F.pad(mask[:, 0], (kernel, 0), value=-1e9)
    seen = [padded.diagonal(kernel + past - s, 1, 2)[:, :t] > -1 for s in range(kernel)]
    return torch.stack(seen, -1).float()


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class DeltaAttention(nn.Module):
    """Linear attention by the gated delta rule; rows of `proj` are q, k, v, z, b, a."""

    def __init__(self, s: QwenShape, std: float, out_std: float) -> None:
        super().__init__()
        self.s, heads = s, s.linear_num_value_heads
        keys = s.linear_num_key_heads * s.linear_key_head_dim
        values = heads * s.linear_value_head_dim
        self.sizes = [2 * keys + values, values, heads, heads]
        self.proj = linear(
            sum(self.sizes), s.hidden_size, std, (keys, keys, values, *self.sizes[1:])
        )
        conv = torch.randn(self.sizes[0], s.linear_conv_kernel_dim) * 0.2
        conv[:, -1] += 1
        self.conv = nn.Parameter(conv)
        self.A_log = nn.Parameter(torch.full((heads,), math.log(4.0)))
        step = torch.logspace(math.log10(0.002), math.log10(0.5), heads) / 4  # g starts at -4 step
        self.dt_bias = nn.Parameter(step.expm1().log())  # the inverse of softplus
        self.norm = nn.Parameter(torch.ones(s.linear_value_head_dim))
        self.out_proj = linear(s.hidden_size, values, out_std)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(F.linear(x, self.proj), self.sizes, -1)

    def convolve(self, past: Tensor, links: Tensor) -> Tensor:
        """Convolve [B, kernel - 1 + T, C]; `links` cuts inputs of other documents."""
        kernel, t = self.s.linear_conv_kernel_dim, links.shape[1]
        mixed = torch.zeros_like(past[:, :t], dtype=torch.float32)
        for s in range(kernel):
            start = kernel - 1 - s
            mixed = mixed + past[:, start : start + t] * links[..., s, None] * self.conv[:, start]
        return F.silu(mixed)

    def rule_inputs(self, mixed: Tensor, b: Tensor, a: Tensor, links: Tensor) -> list[Tensor]:
        """Compute the delta rule's q, k, v, decay and beta in fp32."""
        s, (n, t, _) = self.s, mixed.shape
        keys = s.linear_num_key_heads * s.linear_key_head_dim
        q, k, v = torch.split(mixed, [keys, keys, self.sizes[1]], -1)
        q, k = (unit(y.view(n, t, s.linear_num_key_heads, -1)) for y in (q, k))
        shared = s.linear_num_value_heads // s.linear_num_key_heads
        if shared > 1:
            q, k = q.repeat_interleave(shared, 2), k.repeat_interleave(shared, 2)
        g = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        decay = g.exp() * links[..., 1, None]
        q = q * s.linear_key_head_dim**-0.5
        return [q, k, v.view(n, t, s.linear_num_value_heads, -1), decay, b.float().sigmoid()]

    def output(self, outputs: Tensor, z: Tensor) -> Tensor:
        """Normalise and gate the rule's outputs [B, T, H, Dv], and project them."""
        scale = torch.rsqrt(outputs.square().mean(-1, keepdim=True) + self.s.rms_norm_eps)
        gated = (outputs * scale * self.norm).flatten(2) * F.silu(z.float())
        return F.linear(gated.to(z.dtype), self.out_proj)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, links: Tensor) -> Tensor:
        qkv, z, b, a = self.project(x)
        past = F.pad(qkv, (0, 0, self.s.linear_conv_kernel_dim - 1, 0))
        q, k, v, decay, beta = self.rule_inputs(self.convolve(past, links), b, a, links)
        return self.output(delta_outputs(q, k, v, decay, beta), z)

    def step(
        self, x: Tensor, links: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Continue from a state: the convolution's last inputs, and S [B, H, Dk, Dv]."""
        s, (qkv, z, b, a) = self.s, self.project(x)
        if state is None:
            tail = qkv.new_zeros(len(x), s.linear_conv_kernel_dim - 1, qkv.shape[-1])
            sizes = (s.linear_num_value_heads, s.linear_key_head_dim, s.linear_value_head_dim)
            state = tail, qkv.new_zeros(len(x), *sizes)
        past = torch.cat([state[0], qkv], 1)
        q, k, v, decay, beta = self.rule_inputs(self.convolve(past, links), b, a, links)
        outputs, advanced = recurrent(q, k, v, decay, beta, state[1])
        return self.output(outputs, z), (past[:, x.shape[1] :], advanced)


class Block(nn.Module):
    def __init__(self, s: QwenShape, full: bool) -> None:
        super().__init__()
        std = 0.5 * s.hidden_size**-0.5
        out_std = std / math.sqrt(2 * s.num_hidden_layers)
        self.input_norm = OffsetNorm(s.hidden_size, s.rms_norm_eps)
        self.attention = (Attention if full else DeltaAttention)(s, std, out_std)
        self.post_norm = OffsetNorm(s.hidden_size, s.rms_norm_eps)
        self.ffn = DenseFFN(s.hidden_size, s.intermediate_size, std, out_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, links: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin, mask, links)
        return x + self.ffn(self.post_norm(x))


class Module(nn.Module):
    """One more full-attention block, on the hidden state of slot p and the next token."""

    def __init__(self, s: QwenShape) -> None:
        super().__init__()
        self.enorm = OffsetNorm(s.hidden_size, s.rms_norm_eps)
        self.hnorm = OffsetNorm(s.hidden_size, s.rms_norm_eps)
        self.fc = linear(s.hidden_size, 2 * s.hidden_size, s.hidden_size**-0.5)
        self.block = Block(s, full=True)
        self.norm = OffsetNorm(s.hidden_size, s.rms_norm_eps)

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return F.linear(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1), self.fc)


class QwenModel(TrainedModel):
    """Qwen3.5's architecture, with one MTP module of full attention."""

    def __init__(self, shape: QwenShape) -> None:
        super().__init__()
        s = self.shape = shape
        self.embed = nn.Parameter(torch.randn(s.vocab_size, s.hidden_size) * 0.5)
        self.layers = nn.ModuleList(Block(s, s.is_full(i)) for i in range(s.num_hidden_layers))
        self.norm = OffsetNorm(s.hidden_size, s.rms_norm_eps)
        self.mtp = nn.ModuleList(Module(s) for _ in range(s.mtp_num_hidden_layers))
        self.head = nn.Parameter(torch.randn(s.vocab_size, s.hidden_size) * 0.02)
        frequencies = s.rope_theta ** (-torch.arange(0, s.rotated, 2).double() / s.rotated)
        angles = torch.outer(torch.arange(s.max_position_embeddings).float(), frequencies.float())
        self.register_buffer("cos", angles.cos().unsqueeze(1), persistent=False)  # [P, 1, R/2]
        self.register_buffer("sin", angles.sin().unsqueeze(1), persistent=False)

    def trunk(self, tokens: Tensor, mask: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        seen = links(mask, self.shape.linear_conv_kernel_dim)
        x = F.embedding(tokens, self.embed)
        for layer in self.layers:
            x = layer(x, cos, sin, mask, seen)
        return self.norm(x)

    def draft(self, index: int, hidden: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        module = self.mtp[index]
        x = module.join(hidden, F.embedding(tokens, self.embed))
        return module.norm(module.block(x, cos, sin, mask, mask))
