"""Exports the model to an ordinary ONNX graph; it needs mtpbuild's extra [build].

    python plain_export.py CHECKPOINT MODEL.onnx

The graph takes tokens and past keys and values, and returns logits and all keys and values. They
are cached for every head, concatenated and passed by value.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.plain import PlainDecoderLayer, PlainMoE
from mtpbuild.builder.models.common.rope import rotate
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek, PlainLatentAttention


class Plain(nn.Module):
    def __init__(self, model: PlainDeepseek) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        model, present = self.model, []
        T, P = tokens.shape[1], past[0][0].shape[2]
        places = P + torch.arange(T)
        cos, sin = model.cos[places], model.sin[places]
        mask = torch.arange(P + T)[None, :] <= places[:, None]
        x = model.model.embed_tokens(tokens)
        for layer, before in zip(model.model.layers, past, strict=False):
            assert isinstance(layer, PlainDecoderLayer)
            assert isinstance(layer.self_attn, PlainLatentAttention)
            y, kept = attend(layer.self_attn, layer.input_layernorm(x), cos, sin, mask, before)
            present.append(kept)
            x = x + y
            x = x + feed_forward(layer.mlp, layer.post_attention_layernorm(x))
        return model.lm_head(model.model.norm(x)[:, -1:]), present


def feed_forward(mlp: nn.Module, x: Tensor) -> Tensor:
    """Run a layer's feed-forward part, with all experts: the graph has no branches."""
    if not isinstance(mlp, PlainMoE):
        return mlp(x)
    y = x.new_zeros(()) if mlp.shared_experts is None else mlp.shared_experts(x)
    for weight, expert in zip(mlp.gate(x).unbind(-1), mlp.experts, strict=True):
        y = y + weight[..., None] * expert(x)
    return y


def attend(
    a: PlainLatentAttention,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    past: tuple[Tensor, Tensor],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    c, (B, T, _) = a.config, x.shape
    q = a.queries(x).view(B, T, c.num_attention_heads, c.qk_head_dim).transpose(1, 2)
    q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
    latent, k_pe = a.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
    kv = a.kv_b_proj(a.kv_a_layernorm(latent)).view(B, T, c.num_attention_heads, -1)
    k_nope, v = kv.transpose(1, 2).split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
    q_pe = rotate(q_pe, cos, sin, c.rope_interleave)
    k_pe = rotate(k_pe, cos, sin, c.rope_interleave)[:, None].expand_as(q_pe)
    q = torch.cat([q_nope, q_pe], -1)
    k = torch.cat([past[0], torch.cat([k_nope, k_pe], -1)], dim=2)
    v = torch.cat([past[1], v], dim=2)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=a.scale)
    return a.o_proj(o.transpose(1, 2).reshape(B, T, -1)), (k, v)


def export(checkpoint: Path, out: Path) -> None:
    """Export the checkpoint's main model."""
    c = load_config(checkpoint)
    assert isinstance(c, DeepseekV3Config)
    model = PlainDeepseek(c).eval()
    stored = load_file(checkpoint / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    shape = (1, c.num_attention_heads, 3)
    layers = range(c.num_hidden_layers)
    past = [(torch.zeros(*shape, c.qk_head_dim), torch.zeros(*shape, c.v_head_dim)) for _ in layers]
    length, chunk = torch.export.Dim("past", min=0, max=4096), torch.export.Dim("chunk", max=4096)
    varying = [({2: length}, {2: length}) for _ in layers]
    names = [f"{kind}.{i}" for i in layers for kind in ("key", "value")]
    with torch.no_grad():
        torch.onnx.export(
            Plain(model),
            (torch.zeros(1, 5, dtype=torch.long), past),
            out,
            dynamo=True,
            dynamic_shapes=({1: chunk}, varying),
            input_names=["tokens", *(f"past_{name}" for name in names)],
            output_names=["logits", *(f"present_{name}" for name in names)],
            verbose=False,
        )


export(Path(sys.argv[1]), Path(sys.argv[2]))
