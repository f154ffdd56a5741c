"""Random checkpoints whose projections a package quantises, and digests of what they mean then."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.families import make_family, save_family

GLM: dict[str, Any] = {
    "vocab_size": 41, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "head_dim": 16, "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 3,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 41, "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32,
    "v_head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 3,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_nextn_predict_layers": 1,
}  # fmt: skip
# A weight's name, the weight -> its tensors by ending, and its dequantised values in fp32
Pack = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def write_packed(
    out: Path, family: str, sizes: dict[str, Any], said: dict[str, Any], pack: Pack
) -> None:
    """Write a checkpoint; said: its `quantization_config`."""
    with TemporaryDirectory() as folder:
        source = save_family(Path(folder), family, make_family(family, **sizes), **sizes)
        config = json.loads((source / "config.json").read_text())
        weights = load_file(source / "model.safetensors")
    tensors, digests = dict[str, Tensor](), dict[str, str]()
    for name, weight in weights.items():
        if not is_packed(name, weight):
            tensors[name] = weight.half()
            continue
        parts, meant = pack(name, weight)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{ending}": part.contiguous() for ending, part in parts.items()}
        assert meant.shape == weight.shape
        assert (meant - weight).abs().mean() < 0.2 * weight.abs().mean(), name
        digests[name] = hashlib.sha256(meant.float().contiguous().numpy().tobytes()).hexdigest()
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": said}, indent=1))
    (out / "dequantised.json").write_text(json.dumps(digests, indent=0))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def is_packed(name: str, weight: Tensor) -> bool:
    """Return whether a weight is a projection that fills words of eight."""
    return weight.dim() == 2 and "_proj" in name and "eh_proj" not in name and len(weight) >= 32


def grid(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return scales and zero points of groups [N, K / group], zero points from 1 on."""
    groups, most = weight.unflatten(1, (-1, group)), 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(-1) / 2 ** (bits - 1)
        return scales.half().float(), torch.full_like(scales, 2 ** (bits - 1))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / most).half().float()
    return scales, (-low / scales).round().clamp(1, most)
