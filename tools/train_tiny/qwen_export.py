"""Hugging Face's names and config.json of Qwen3.5's architecture."""

from typing import Any

import torch
from torch import Tensor

from qwen import Attention, Block, DeltaAttention, QwenModel, QwenShape
from tokenizer import BOS_ID, EOS_ID


def attention_tensors(attention: Attention) -> dict[str, Tensor]:
    q, k, v = torch.split(attention.proj, attention.sizes)
    return {
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.q_norm.weight": attention.q_norm.weight,
        "self_attn.k_norm.weight": attention.k_norm.weight,
        "self_attn.o_proj.weight": attention.o_proj,
    }


def delta_tensors(attention: DeltaAttention) -> dict[str, Tensor]:
    qkv, z, b, a = torch.split(attention.proj, attention.sizes)
    return {
        "linear_attn.in_proj_qkv.weight": qkv,
        "linear_attn.in_proj_z.weight": z,
        "linear_attn.in_proj_b.weight": b,
        "linear_attn.in_proj_a.weight": a,
        "linear_attn.conv1d.weight": attention.conv.unsqueeze(1),
        "linear_attn.A_log": attention.A_log,
        "linear_attn.dt_bias": attention.dt_bias,
        "linear_attn.norm.weight": attention.norm,
        "linear_attn.out_proj.weight": attention.out_proj,
    }


def block_tensors(block: Block) -> dict[str, Tensor]:
    mixer = block.attention
    mixing = attention_tensors(mixer) if isinstance(mixer, Attention) else delta_tensors(mixer)
    gate, up = block.ffn.gate_up.chunk(2)
    return {
        "input_layernorm.weight": block.input_norm.weight,
        "post_attention_layernorm.weight": block.post_norm.weight,
        **mixing,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": block.ffn.down,
    }


def qwen_views(model: QwenModel) -> dict[str, Tensor]:
    """Map each Hugging Face name to a view of the fused parameter that holds the tensor."""
    module = model.mtp[0]
    found: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head,
        "mtp.fc.weight": module.fc,
        "mtp.pre_fc_norm_embedding.weight": module.enorm.weight,
        "mtp.pre_fc_norm_hidden.weight": module.hnorm.weight,
        "mtp.norm.weight": module.norm.weight,
    }
    blocks = {f"model.layers.{i}": block for i, block in enumerate(model.layers)}
    for place, block in (blocks | {"mtp.layers.0": module.block}).items():
        found |= {f"{place}.{name}": tensor for name, tensor in block_tensors(block).items()}
    return {name: tensor.detach() for name, tensor in found.items()}


def qwen_config(s: QwenShape) -> dict[str, Any]:
    """Return config.json as Qwen3_5ForCausalLM has it."""
    rotary = ("rope_theta", "partial_rotary_factor")
    kinds = ("linear_attention", "full_attention")
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **{name: value for name, value in vars(s).items() if name not in rotary},
        "layer_types": [kinds[s.is_full(i)] for i in range(s.num_hidden_layers)],
        "attn_output_gate": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "mtp_use_dedicated_embeddings": False,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": s.rope_theta,
            "partial_rotary_factor": s.partial_rotary_factor,
        },
        "dtype": "bfloat16",
    }


def qwen_shape(values: dict[str, Any]) -> QwenShape:
    """Read the sizes from a config.json that `qwen_config` made."""
    found = values | values["rope_parameters"]
    return QwenShape(**{name: found[name] for name in vars(QwenShape())})
