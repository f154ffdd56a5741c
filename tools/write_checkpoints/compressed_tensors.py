r"""Write small checkpoints with compressed-tensors 0.20.0, and digests of what it dequantises.

    pip install -e . compressed-tensors==0.20.0   # in an environment of its own
    PYTHONSAFEPATH=1 PYTHONPATH=. python tools/write_checkpoints/compressed_tensors.py \
        tests/data/checkpoints

Weights are random. `dequantised.json` has the SHA-256 of each quantised weight's fp32 values.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from tests.support.families import make_family, save_family

NOT_QUANTISED = ["lm_head", "re:.*(embed_tokens|mlp.gate|eh_proj|conv1d|in_proj_[ab]|fc)$"]
DEEPSEEK = {
    "vocab_size": 41, "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 4,
    "v_head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 2,
    "num_hidden_layers": 2, "num_nextn_predict_layers": 1,
}  # fmt: skip
GLM = {
    "vocab_size": 41, "hidden_size": 64, "intermediate_size": 136, "moe_intermediate_size": 16,
    "head_dim": 8, "n_routed_experts": 2, "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN = {
    "vocab_size": 41, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "num_hidden_layers": 2, "full_attention_interval": 2,
    "tie_word_embeddings": False,
}  # fmt: skip

Groups = list[tuple[str, str, str, dict[str, Any]]]  # target, preset, format, its own arguments
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], Groups]] = {
    "deepseek_w4a16": (
        "kimi", DEEPSEEK, [("Linear", "W4A16", "pack-quantized", {"group_size": 32})],
    ),
    "glm4_fp8_dynamic": ("glm-4.6", GLM, [("Linear", "FP8_DYNAMIC", "float-quantized", {})]),
    "glm4_fp8_block": ("glm-4.6", GLM, [("Linear", "FP8_BLOCK", "float-quantized", {})]),
    "qwen3_5_w8a8": ("qwen3.5", QWEN, [("Linear", "W8A8", "int-quantized", {})]),
    "deepseek_mixed": ("kimi", DEEPSEEK, [
        ("re:.*q_a_proj$", "FP8", "naive-quantized", {}),
        ("re:.*q_b_proj$", "FP8_BLOCK", "float-quantized", {}),
        ("re:.*kv_a_proj_with_mqa$", "W8A16", "pack-quantized", {"group_size": 32}),
        ("re:.*kv_b_proj$", "W4A16_ASYM", "pack-quantized", {"group_size": 16}),
        ("re:.*o_proj$", "W8A16", "pack-quantized", {"strategy": "channel", "group_size": None}),
        ("re:.*layers.0.mlp.*_proj$", "NVFP4A16", "nvfp4-pack-quantized", {}),
        ("re:.*mlp.experts.*gate_proj$", "MXFP4A16", "mxfp4-pack-quantized", {}),
        ("re:.*mlp.experts.*up_proj$", "W3A16", "pack-quantized", {"group_size": 64}),
        ("re:.*mlp.experts.*down_proj$", "W8A16", "pack-quantized",
         {"strategy": "channel", "group_size": None, "symmetric": False}),
        ("re:.*shared_experts.gate_proj$", "MXFP8A16", "mxfp8-quantized", {}),
        ("re:.*shared_experts.up_proj$", "W8A8", "int-quantized", {"symmetric": False}),
        ("re:.*shared_experts.down_proj$", "W5A16", "pack-quantized", {"group_size": 16}),
    ]),
}  # fmt: skip


def make_scheme(target: str, preset: str, format: str, own: dict[str, Any]) -> QuantizationScheme:
    scheme = preset_name_to_scheme(preset, [target]).model_dump()
    scheme["weights"] |= own
    return QuantizationScheme(**scheme | {"format": format})


def quantise(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Return a module's tensors as the package stores them; scales are bf16, as such models'."""
    args, state = scheme.weights, {"weight": weight}
    blocks = weight.flatten()[None] if args.strategy == "tensor" else weight
    if args.group_size:
        blocks = weight.unflatten(-1, (-1, args.group_size))
    if args.block_structure:
        rows, columns = args.block_structure
        padded = pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        blocks = blocks.transpose(1, 2).flatten(2)
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    least, most = blocks.amin(-1), blocks.amax(-1)
    scale, zero = calculate_qparams(least, most, args, state.get("weight_global_scale"))
    if scale.dim() == 1 and args.strategy == "channel":
        scale, zero = scale[:, None], zero[:, None]
    if scheme.format.startswith("mx"):
        scale = calculate_mx_scale(blocks, args.num_bits)
    elif args.strategy != "tensor_group":
        scale = scale.bfloat16()
    state |= {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    return BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)


def calculate_mx_scale(blocks: Tensor, bits: int) -> Tensor:
    largest = {4: 6.0, 8: 448.0}[bits]
    return torch.exp2((blocks.abs().amax(-1) / largest).log2().ceil())


def dequantise(state: dict[str, Tensor], scheme: QuantizationScheme) -> Tensor:
    """Return the fp32 values; scales are cast first, as the package computes in their type."""
    if scheme.format == "nvfp4-pack-quantized":
        rows, columns = state["weight_packed"].shape
        values = unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * columns, torch.float32)
        scales, second = state["weight_scale"].float(), state["weight_global_scale"]
        return dequantize(values, scales, None, scheme.weights, global_scale=second)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    if not scheme.format.startswith("mx"):
        state = state | {"weight_scale": state["weight_scale"].float()}
    return compressor.decompress(state, scheme)["weight"].float()


def find_scheme(name: str, schemes: list[QuantizationScheme]) -> QuantizationScheme | None:
    module = name.removesuffix(".weight")
    if any(re.match(i.removeprefix("re:"), module) for i in NOT_QUANTISED):
        return None
    for scheme in schemes:
        (target,) = scheme.targets
        if target == "Linear" or re.match(target.removeprefix("re:"), module):
            return scheme
    return None


def write(folder: Path, family: str, sizes: dict[str, Any], groups: Groups) -> None:
    save_family(folder, family, make_family(family, **sizes), **sizes)
    schemes = [make_scheme(*group) for group in groups]
    tensors, digests = dict[str, Tensor](), dict[str, str]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        scheme = find_scheme(name, schemes) if tensor.dim() == 2 else None
        if scheme is None:
            floats = name.endswith(("e_score_correction_bias", "A_log", "dt_bias"))
            tensors[name] = tensor if floats else tensor.bfloat16()
            continue
        state = quantise(tensor, scheme)
        module = name.removesuffix("weight")
        tensors |= {f"{module}{part}": each.contiguous() for part, each in state.items()}
        digests[name] = digest(dequantise(state, scheme))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    format = groups[0][2] if len(groups) == 1 else "mixed-precision"
    said = QuantizationConfig(
        config_groups={f"group_{i}": scheme for i, scheme in enumerate(schemes)},
        ignore=NOT_QUANTISED,
        format=format,
        quantization_status="compressed",
    ).to_dict()
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "dequantised.json").write_text(json.dumps(digests, indent=1))


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    for name, how in CHECKPOINTS.items():
        write(Path(sys.argv[1]) / name, *how)
