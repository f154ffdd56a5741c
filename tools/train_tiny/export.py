"""Writes a checkpoint of train.py as a Hugging Face folder in bf16."""

import argparse
import json
import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import find_trained_model
from model import Block, Model, MoE, MTPModule, Shape, TrainedModel
from qwen import QwenModel
from qwen_export import qwen_config, qwen_shape, qwen_views
from tokenizer import BOS_ID, EOS_ID


def load_model(path: Path) -> TrainedModel:
    """Load the model from a checkpoint written by train.py or distill.py."""
    stored = torch.load(path, map_location="cpu")
    model = find_trained_model(stored["shape"])
    model.load_state_dict(stored["model"])
    return model.eval()


def moe_tensors(moe: MoE) -> dict[str, Tensor]:
    out = {"gate.weight": moe.router, "gate.e_score_correction_bias": moe.bias}
    parts = [p.chunk(moe.s.n_routed_experts + 1) for p in (moe.gate, moe.up, moe.down)]
    for e, (gate, up, down) in enumerate(zip(*parts, strict=True)):
        name = f"experts.{e}" if e < moe.s.n_routed_experts else "shared_experts"
        out[f"{name}.gate_proj.weight"] = gate
        out[f"{name}.up_proj.weight"] = up
        out[f"{name}.down_proj.weight"] = down.T
    return out


def block_tensors(block: Block) -> dict[str, Tensor]:
    attention, s = block.attention, block.attention.s
    latent = s.kv_lora_rank + s.qk_rope_head_dim
    q_a, kv_a = torch.split(attention.a_proj, [s.q_lora_rank, latent])
    out = {
        "input_layernorm.weight": block.input_norm.weight,
        "post_attention_layernorm.weight": block.post_norm.weight,
        "self_attn.q_a_proj.weight": q_a,
        "self_attn.q_a_layernorm.weight": attention.q_norm.weight,
        "self_attn.q_b_proj.weight": attention.q_b,
        "self_attn.kv_a_proj_with_mqa.weight": kv_a,
        "self_attn.kv_a_layernorm.weight": attention.kv_norm.weight,
        "self_attn.kv_b_proj.weight": attention.kv_b,
        "self_attn.o_proj.weight": attention.o_proj,
    }
    if isinstance(block.ffn, MoE):
        return out | {f"mlp.{name}": tensor for name, tensor in moe_tensors(block.ffn).items()}
    gate, up = block.ffn.gate_up.chunk(2)
    return out | {
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": block.ffn.down,
    }


def module_tensors(module: MTPModule) -> dict[str, Tensor]:
    return block_tensors(module.block) | {
        "enorm.weight": module.enorm.weight,
        "hnorm.weight": module.hnorm.weight,
        "eh_proj.weight": module.eh_proj,
        "shared_head.norm.weight": module.norm.weight,
    }


def views(model: TrainedModel) -> dict[str, Tensor]:
    """Map each Hugging Face name to a view of the fused parameter that holds the tensor."""
    if isinstance(model, QwenModel):
        return qwen_views(model)
    found: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head,
    }
    parts = [block_tensors(layer) for layer in model.layers]
    parts += [module_tensors(module) for module in model.mtp]
    for i, part in enumerate(parts):
        found |= {f"model.layers.{i}.{name}": tensor for name, tensor in part.items()}
    return {name: tensor.detach() for name, tensor in found.items()}


def tensors(model: TrainedModel) -> dict[str, Tensor]:
    """Return the tensors to store: bf16, except for the router's bias in fp32."""
    return {
        name: t.to(torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        .clone()
        .contiguous()
        for name, t in views(model).items()
    }


def shape_of(values: dict[str, Any]) -> Shape:
    """Read the sizes from a config.json that `config` made."""
    known = {f.name for f in fields(Shape)}
    rope = values["rope_scaling"]
    return Shape(
        **{k: v for k, v in values.items() if k in known},
        rope_factor=rope["factor"],
        rope_original_positions=rope["original_max_position_embeddings"],
    )


def load_folder(folder: Path) -> TrainedModel:
    """Load an exported folder's weights into the training model, which computes in fp32."""
    values = json.loads((folder / "config.json").read_text())
    ours = values["model_type"].startswith("qwen3_5")
    model = QwenModel(qwen_shape(values)) if ours else Model(shape_of(values))
    stored = load_file(folder / "model.safetensors")
    for name, view in views(model).items():
        view.copy_(stored[name])
    return model.eval()


def config(s: Shape) -> dict[str, Any]:
    """Return config.json in DeepSeek's own spelling."""
    same = {k: v for k, v in vars(s).items() if not k.startswith("rope")}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **same,
        "num_key_value_heads": s.num_attention_heads,
        "n_shared_experts": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "rope_theta": s.rope_theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": s.rope_factor,
            "original_max_position_embeddings": s.rope_original_positions,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "torch_dtype": "bfloat16",
    }


GENERATION = {
    "_from_model_config": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
}


def write(model: TrainedModel, folder: Path) -> None:
    """Write the folder; each file is complete before it replaces an old one, the weights last."""
    folder.mkdir(parents=True, exist_ok=True)
    qwen = isinstance(model, QwenModel)
    made_config = qwen_config(model.shape) if qwen else config(model.shape)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as made:
        for name, content in (("config", made_config), ("generation_config", GENERATION)):
            (Path(made) / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
        save_file(tensors(model), Path(made) / "model.safetensors", metadata={"format": "pt"})
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            (Path(made) / name).chmod(0o644)
            os.replace(Path(made) / name, folder / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/tiny/distill.pt"))
    parser.add_argument("--out", type=Path, default=Path("recipes/deepseek_tiny"))
    arguments = parser.parse_args()
    write(load_model(arguments.checkpoint), arguments.out)
