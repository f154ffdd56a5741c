"""Makes random checkpoints of every family, in odd shapes that show differences to DeepSeek-V3."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtpbuild.builder.models import find_family
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.models.qwen3_5.config import Qwen35Config
from tests.support.checkpoints import BASE, randomise, without_nulls, write_checkpoint

EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16, "n_routed_experts": 6, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.8, "first_k_dense_replace": 1,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_nextn_predict_layers": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "bos_token_id": 0, "eos_token_id": [1, 2],
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 10, "kv_lora_rank": 14,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10,
}  # fmt: skip
YARN = {
    "type": "yarn", "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    # no q_lora, values wider than keys, steep YaRN with another theta
    "gigachat": BASE | SIZES | EXPERTS | LATENT | {
        "rms_norm_eps": 1e-6, "q_lora_rank": None, "n_routed_experts": 18, "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.0, "rope_theta": 100000,
        "rope_scaling": YARN | {"factor": 64, "beta_fast": 32, "beta_slow": 1},
    },
    # two shared experts, no modules, another eps in the norms of latents
    "moonlight": BASE | SIZES | EXPERTS | LATENT | {
        "q_lora_rank": None, "n_shared_experts": 2, "num_nextn_predict_layers": 0,
        "rope_theta": 50000, "rope_scaling": None,
    },
    # makes YaRN's ramp a step
    "kimi": BASE | SIZES | EXPERTS | LATENT | {
        "num_nextn_predict_layers": 0, "rope_theta": 50000,
        "rope_scaling": YARN | {"factor": 32, "beta_fast": 1, "beta_slow": 1},
    },
    "glm-flash": SIZES | EXPERTS | LATENT | {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["dense", "sparse"], "rope_theta": 1000000, "rope_scaling": None,
        "partial_rotary_factor": 1.0,
    },
    "glm-air": SIZES | EXPERTS | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True, "use_qk_norm": False,
        "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None,
    },
    # normalised queries and keys, more dense layers, YaRN
    "glm-4.6": SIZES | EXPERTS | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 3,
        "first_k_dense_replace": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
        "rope_theta": 1000000, "rope_scaling": YARN | {"factor": 4}, "n_routed_experts": 18,
    },
    # Llama 3's scaling; one key head; heads wider than their share; tied
    "llama": SIZES | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_nextn_predict_layers": 0,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "rope_theta": 500000,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": SIZES | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 14,
        "num_nextn_predict_layers": 0, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_theta": 1000000, "sliding_window": 256,
    },
    "qwen2": SIZES | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 3,
        "num_nextn_predict_layers": 0, "num_key_value_heads": 3, "rope_theta": 1000000,
        "tie_word_embeddings": True,
    },
    # YaRN
    "qwen3": SIZES | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 6,
        "num_nextn_predict_layers": 0, "num_key_value_heads": 2, "head_dim": 12,
        "rope_theta": 1000000,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "mimo": SIZES | {
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "attention_bias": True, "rope_theta": 640000,
        "rope_scaling": None,
    },
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "mtp_num_hidden_layers": 1, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [1, 0, 0],
    },
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": [1, 2],
}  # fmt: skip
SPARSE: dict[str, Any] = {
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20, "num_experts": 6,
    "num_experts_per_tok": 2,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    # three layers of a delta rule to one of attention, as published
    "qwen3.5": HYBRID | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "intermediate_size": 40, "tie_word_embeddings": True,
    },
    # begins with attention; as many key heads as value heads; two taps; heads that rotate by half
    "qwen3.5-ragged": HYBRID | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "intermediate_size": 36, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "linear_conv_kernel_dim": 2, "linear_num_key_heads": 3, "linear_num_value_heads": 3,
        "linear_key_head_dim": 10, "linear_value_head_dim": 6,
        "rope_parameters": HYBRID["rope_parameters"]
        | {"rope_theta": 10000, "partial_rotary_factor": 0.5, "mrope_section": [2, 0, 0]},
    },
    # three value heads to a key head; many experts, of which the chosen ones are read
    "qwen3.5-moe": HYBRID | SPARSE | {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 18,
        "linear_num_value_heads": 6,
    },
    # packed projections, a dense layer
    "qwen3-next": HYBRID | SPARSE | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "intermediate_size": 40, "mlp_only_layers": [1], "norm_topk_prob": True,
    },
}  # fmt: skip
# Contexts of 30 tokens have several times the rows that are chosen.
CHOICE: dict[str, Any] = {"index_topk": 8, "index_n_heads": 12, "index_head_dim": 10}
CHOOSERS: dict[str, dict[str, Any]] = {
    # halves rotate in the indexer, neighbours in the attention; YaRN; drafts choose for themselves
    "deepseek-v3.2": BASE | SIZES | EXPERTS | LATENT | CHOICE | {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "rope_scaling": YARN | {"factor": 4, "beta_fast": 32, "beta_slow": 1},
    },
    # neighbours rotate in both; a layer without an indexer; later drafts take the first one's rows
    "glm-5": SIZES | EXPERTS | LATENT | CHOICE | {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
        "num_hidden_layers": 3, "num_nextn_predict_layers": 1,
        "indexer_types": ["full", "full", "shared"], "index_share_for_mtp_iteration": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    },
}  # fmt: skip
FAMILIES |= HYBRIDS | CHOOSERS


def modules_of(config: dict[str, Any]) -> int:
    return int(config.get("num_nextn_predict_layers", config.get("mtp_num_hidden_layers", 0)))


WITH_MODULES = [name for name, config in FAMILIES.items() if modules_of(config)]


def make_family(name: str, seed: int = 0, **overrides: Any) -> PlainCausalLM:
    """Make a plain model in which a token is mostly followed by its fixed permutation.

    Trunk and modules both know it, so natural drafts are accepted often, but not always.
    """
    raw = make_config(name, **overrides)
    family = find_family(raw)
    torch.manual_seed(seed)
    model = family.reference(family.config.parse(raw)).eval()
    assert isinstance(model, PlainCausalLM)
    spread(model)
    return model


@torch.no_grad()
def spread(model: PlainCausalLM) -> None:
    """Draw such weights."""
    c = model.config
    randomise(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith((".bias", "e_score_correction_bias")):
            tensor.uniform_(-0.3, 0.3)
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.mul_(0.5 if c.tie_word_embeddings else 0.12)
        elif name.endswith("norm.weight") and isinstance(c, Qwen35Config):
            if "linear_attn" not in name:
                tensor.sub_(1)  # what is stored is how much a factor is above 1
        elif name.endswith("A_log"):
            tensor.uniform_(-2.0, 1.0)
    embedding = model.model.embed_tokens.weight
    assert isinstance(embedding, nn.Parameter)
    embedding.normal_(std=0.3 if c.tie_word_embeddings else 1.0)
    if not c.tie_word_embeddings:
        model.lm_head.weight[torch.randperm(c.vocab_size)] += embedding
    for k in range(1, c.num_nextn_predict_layers + 1):
        weight = model.module(k).get_parameter(f"{c.module_names.input_proj}.weight")
        weight.normal_(std=0.3 if isinstance(c, Qwen35Config) else 0.1)
        half = c.hidden_size if c.mtp.hidden_first else 0
        weight[:, half : half + c.hidden_size] += torch.eye(c.hidden_size)


def make_config(name: str, **overrides: Any) -> dict[str, Any]:
    return without_nulls(FAMILIES[name] | overrides)


def save_family(folder: Path, name: str, model: PlainCausalLM, **overrides: Any) -> Path:
    """Write a checkpoint as the family's repositories have it."""
    return write_checkpoint(folder, make_config(name, **overrides), model)
