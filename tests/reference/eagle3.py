"""An EAGLE-3 head over any plain trunk, from whole sequences and by the published names."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.builder.models.common.plain import PlainCausalLM, PlainLM

LAYER: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 5000, "vocab_size": 61,
    "max_position_embeddings": 256, "hidden_act": "silu", "num_hidden_layers": 1,
}  # fmt: skip
TAPS = "eagle_aux_hidden_state_layer_ids"


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate x [B, T, heads, D] by positions from 0, pairs (i, i + D / 2)."""
    half = x.shape[-1] // 2
    steps = theta ** (-torch.arange(half) / half)
    angles = (torch.arange(x.shape[1])[:, None] * steps)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class PlainEagle3(PlainLM):
    """A trunk whose drafts are the head's; hidden states are the trunk's, then g.

    config: the trunk's, with the head's values as the builder reads them. raw: the head's own
    config.json. weights: its tensors, with `layers.0.` before those of the layer.
    """

    def __init__(
        self, trunk: PlainCausalLM, config: Any, raw: dict[str, Any], weights: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.config, self.raw, self.weights = config, raw, weights
        self.trunk = (trunk,)
        self.taps, self.eps = raw[TAPS], raw["rms_norm_eps"]

    def main(self, tokens: Tensor) -> Tensor:
        trunk, width = self.trunk[0], tokens.shape[1]
        inputs = list[Tensor]()
        x = trunk.model.embed_tokens(tokens)
        for layer in list(trunk.model.layers)[: self.config.num_hidden_layers]:
            inputs.append(x)
            x = layer(x, trunk.cos[:width], trunk.sin[:width])
        inputs.append(x)
        last = trunk.model.norm(x)
        g = last
        if self.raw.get("use_aux_hidden_state", True):
            taps = [inputs[i] for i in self.taps]
            if self.raw.get("fc_norm"):
                taps = [self.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)]
            g = torch.cat(taps, dim=-1)
            if self.raw.get("norm_before_fc"):
                g = self.norm(g, "input_norm")
            g = F.linear(g, self.weights["fc.weight"])
        return torch.cat([last if self.config.mtp.trunk_normed else x, g], dim=-1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return normalise(x, self.weights[f"{name}.weight"], self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.trunk[0].logits(hidden[..., : self.config.hidden_size])

    def product(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"layers.0.{name}_proj.weight"])

    def mtp(self, k: int, tokens: Tensor, hidden: Tensor, later: int = 0) -> Tensor:
        g = hidden[..., -self.raw["hidden_size"] :]
        own = self.weights.get("embed_tokens.weight")
        e = self.trunk[0].model.embed_tokens(tokens) if own is None else F.embedding(tokens, own)
        normed = self.norm(g, "layers.0.hidden_norm")
        x = torch.cat([self.norm(e, "layers.0.input_layernorm"), normed], dim=-1)
        heads, D = self.raw["num_attention_heads"], self.raw["head_dim"]
        q, k_, v = (self.product(x, f"self_attn.{n}").unflatten(-1, (-1, D)) for n in "qkv")
        q, k_ = rotate(q, self.raw["rope_theta"]), rotate(k_, self.raw["rope_theta"])
        k_, v = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (k_, v))
        q, k_, v = (part.transpose(1, 2) for part in (q, k_, v))
        o = F.scaled_dot_product_attention(q, k_, v, is_causal=True)
        x = normed if self.raw.get("norm_before_residual") else g
        x = x + self.product(o.transpose(1, 2).flatten(2), "self_attn.o")
        y = self.norm(x, "layers.0.post_attention_layernorm")
        inner = F.silu(self.product(y, "mlp.gate")) * self.product(y, "mlp.up")
        x = x + self.product(inner, "mlp.down")
        x = self.norm(x, "norm") if self.raw.get("norm_output") else x
        return F.pad(x, (self.config.hidden_size, 0))  # as wide as `main` makes hidden states

    def draft_logits(self, k: int, hidden: Tensor) -> Tensor:
        g = hidden[..., -self.raw["hidden_size"] :]
        x = g if self.raw.get("norm_output") else self.norm(g, "norm")
        head = self.weights.get("lm_head.weight", self.trunk[0].lm_head.weight)
        drafted = F.linear(x, head)
        if "d2t" not in self.weights:
            return drafted
        ids = self.weights["d2t"] + torch.arange(len(self.weights["d2t"]))
        logits = drafted.new_full((*drafted.shape[:-1], self.config.vocab_size), -1e30)
        logits[..., ids] = drafted
        return logits


def make_head(trunk: PlainCausalLM, raw: dict[str, Any], embeds: bool, seed: int = 0) -> Any:
    """Return the weights of a head whose drafts are often right, for a trunk of `make_family`."""
    torch.manual_seed(seed)
    c = trunk.config
    h, D, V = raw["hidden_size"], raw["head_dim"], c.vocab_size
    heads, groups, inner = (
        raw[key] for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    shapes = {
        "q_proj": (heads * D, 2 * h), "k_proj": (groups * D, 2 * h), "v_proj": (groups * D, 2 * h),
        "o_proj": (h, heads * D), "gate_proj": (inner, h), "up_proj": (inner, h),
        "down_proj": (h, inner),
    }  # fmt: skip
    weights = {
        f"layers.0.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}.weight": 0.3
        * torch.randn(shape)
        / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"layers.0.{name}.weight"] = torch.rand(h) + 0.5
    weights["norm.weight"] = torch.rand(h) + 0.5
    if raw.get("use_aux_hidden_state", True):
        taps = len(raw[TAPS])
        weights["fc.weight"] = torch.randn(h, taps * c.hidden_size) / (taps * c.hidden_size) ** 0.5
        if raw.get("norm_before_fc"):
            weights["input_norm.weight"] = torch.rand(taps * c.hidden_size) + 0.5
        for i in range(taps if raw.get("fc_norm") else 0):
            weights[f"fc_norm.{i}.weight"] = torch.rand(c.hidden_size) + 0.5
    if embeds:
        weights["embed_tokens.weight"] = torch.randn(V, h)
    drafted = raw.get("draft_vocab_size")
    if drafted:
        ids = torch.randperm(V)[:drafted].sort().values
        weights["d2t"] = ids - torch.arange(drafted)
    if drafted or h != c.hidden_size:
        weights["lm_head.weight"] = torch.randn(drafted or V, h)
    return {name: w.to(torch.int64) if name == "d2t" else w for name, w in weights.items()}
