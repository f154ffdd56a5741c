"""Makes random DeepSeek-V3 checkpoints of odd shapes, in the Hugging Face layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor, nn

from mtpbuild.builder import models
from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.plain import PlainLM, PlainMTPModule
from mtpbuild.builder.models.common.weight import WHOLE, Share, Weight
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek

BASE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 61,
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 3, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
# A shape is named after its purpose; oracles O1 to O3 run on all shapes.
SHAPES: dict[str, dict[str, Any]] = {
    "yarn-three-modules": {},
    "no-q-lora-one-module": {
        "q_lora_rank": None, "n_routed_experts": 24,  # experts are gathered, not computed densely
        "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1,
        "num_nextn_predict_layers": 1, "rope_theta": None, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "ragged-no-interleave": {
        "hidden_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 20,
        "q_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14,
        "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "num_nextn_predict_layers": 2,
        "rope_interleave": False,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
        },
    },
    "all-dense-no-modules": {"first_k_dense_replace": 3, "num_nextn_predict_layers": 0},
}  # fmt: skip


def make_model(seed: int = 0, **overrides: Any) -> PlainDeepseek:
    """Make a plain model with random weights (`randomise`)."""
    torch.manual_seed(seed)
    model = PlainDeepseek(DeepseekV3Config.parse(without_nulls(BASE | overrides))).eval()
    randomise(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3)
    return model


def without_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out the keys whose value is None, but for `q_lora_rank`, where None has a meaning."""
    return {k: v for k, v in config.items() if v is not None or k == "q_lora_rank"}


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Draw random weights that spread the logits, so that near-ties are rare."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.35)
        else:
            parameter.uniform_(0.5, 1.5)


def make_predictable(seed: int = 0, strength: float = 1.0, **overrides: Any) -> PlainDeepseek:
    """Make a random model in which a token is mostly followed by its fixed permutation.

    Main model and modules both know it, so natural drafts are accepted often, but not always.
    """
    model = make_model(seed, **overrides)
    c = model.config
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight.normal_()
        after = torch.randperm(c.vocab_size)
        model.lm_head.weight[after] += strength * embedding
        for module in list(model.model.layers)[c.num_hidden_layers :]:
            assert isinstance(module, PlainMTPModule)
            weight = module.get_parameter("eh_proj.weight").normal_(std=0.1)
            weight[:, : c.hidden_size] += torch.eye(c.hidden_size)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.12)
    return model


def save_checkpoint(folder: Path, model: PlainDeepseek, **overrides: Any) -> Path:
    return write_checkpoint(folder, without_nulls(BASE | overrides), model)


def write_checkpoint(folder: Path, config: dict[str, Any], model: nn.Module) -> Path:
    """Write config.json and model.safetensors as repositories have them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_checkpoint(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    return save_checkpoint(folder, make_model(seed, **overrides), **overrides)


def load_config(folder: Path) -> DeepseekV3Config:
    """Load a DeepSeek-V3 checkpoint's configuration."""
    config = models.load_config(folder)
    assert isinstance(config, DeepseekV3Config)
    return config


def load_reference(folder: Path) -> PlainDeepseek:
    """Load the plain model with a checkpoint's weights in fp32."""
    model = PlainDeepseek(load_config(folder)).eval()
    weights = {k: v.float() for k, v in load_file(folder / SINGLE).items()}
    model.load_state_dict(weights)
    return model


def lower(reference: PlainLM, share: Share = WHOLE) -> CausalLM:
    """Make the program's model with the plain model's weights, through the table of weights."""
    tensors, family = reference.state_dict(), models.find_family_of(reference.config)
    model = family.make_model(reference.config, share.ranks)
    weights = {
        name: torch.tensor([share.rank])
        for name, _ in model.named_parameters()
        if name.rpartition(".")[2] == "rank"
    }
    for weight in family.weight_table(reference.config, share):
        cut = {s.name: share.cut(s, tensors[s.name]) for s in weight.stored}
        weights[weight.name] = made_of(weight, cut)
    model.load_state_dict(weights, assign=True)
    return model.eval()


def made_of(weight: Weight, tensors: Mapping[str, Tensor]) -> Tensor:
    """Make a program's weight from the checkpoint's tensors by name."""
    slices = ([tensors[stored.name] for stored in group] for group in weight.slices_of_stored)
    return torch.cat([weight.transform(*each) for each in slices])


def write_tokenizer(path: Path, size: int = 1) -> None:
    """Write a byte-level tokenizer of so many tokens."""
    tokenizer = Tokenizer(BPE(vocab={f"t{i}": i for i in range(size)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


SMALLEST: dict[str, Any] = {
    "num_hidden_layers": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}


def shard(folder: Path, count: int = 3) -> None:
    """Rewrite model.safetensors as shards and an index."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::count]}, folder / file)
        weight_map |= dict.fromkeys(names[i::count], file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


# All sizes split into blocks of 32
QUANTIZABLE: dict[str, Any] = {
    "hidden_size": 160, "intermediate_size": 192, "moe_intermediate_size": 64, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
