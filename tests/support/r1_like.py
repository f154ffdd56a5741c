"""Makes a small checkpoint like nvidia/DeepSeek-R1-FP4: experts in nvfp4, the module in bf16."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mtpbuild.builder.checkpoint.shards import SINGLE
from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.weights.scheme import SCHEMES
from tests.support.bfloat16 import rounded
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.requests import quantize

# Eight ranks can share it: each part splits into blocks of 16
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128,
    "num_hidden_layers": 1, "first_k_dense_replace": 0, "num_attention_heads": 8,
    "num_key_value_heads": 8, "n_routed_experts": 32, "num_experts_per_tok": 3,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


def r1_like(folder: Path) -> Path:
    """Write the checkpoint, whose drafts are often right."""
    model = make_predictable(**SHAPE)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".experts." in name and "down_proj" in name:
                weight.mul_(0.1)  # bfloat16 sometimes chooses another expert
    plain = save_checkpoint(folder / "plain", rounded(model), **SHAPE)
    tensors = load_file(plain / SINGLE)
    narrow = {name: t if name.endswith("bias") else t.bfloat16() for name, t in tensors.items()}
    save_file(narrow, plain / SINGLE)
    quantize(QuantizeRequest(str(plain), SCHEMES["nvfp4"], folder / "r1-like"))
    return folder / "r1-like"
