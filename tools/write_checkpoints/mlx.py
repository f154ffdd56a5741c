# ruff: noqa: E402
"""Write small checkpoints with MLX 0.32.4, mlx-lm 0.32.2 and mlx-vlm 0.7.10.

    pip install -e .[dev] && pip install mlx[cpu]==0.32.4 mlx-lm==0.32.2 mlx-vlm==0.7.10
    python tools/write_checkpoints/mlx.py tests/data/checkpoints     # in an environment of its own

mlx-lm converts random models, layer by layer in other widths; mlx-vlm writes heads in folders of
their own. `dequantised.json` has digests of what `mlx.core.dequantize` gives for MLX's tensors,
which hold all experts or heads of a layer; `logits.json` has what MLX's model answers in fp32.
"""

import hashlib
import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT)  # the script's own folder has a module named as the package is

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from mlx_vlm.speculative.drafters.glm4_moe_lite_mtp.split import (
    split_glm4_moe_lite_mtp,
)
from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter
from safetensors.torch import load_file, save_file

from tests.support.families import make_family, save_family

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_experts": 4, "full_attention_interval": 2,
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
PROMPT = [5, 17, 3, 40, 2, 33, 7, 11]
MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


def affine(bits: int, group: int = 32) -> dict[str, Any]:
    return {"group_size": group, "bits": bits, "mode": "affine"}


def mode(name: str) -> dict[str, Any]:
    return {"group_size": MODES[name][0], "bits": MODES[name][1], "mode": name}


def geometry(path: str, quantization: dict[str, Any]) -> dict[str, Any]:
    own = quantization.get(path)
    return own if isinstance(own, dict) else {k: quantization[k] for k in mode("nvfp4")}


def write_digests(out: Path) -> None:
    """Write the digests of a folder's weights, by their tensors' names."""
    tensors = mx.load(str(out / "model.safetensors"))
    quantization = json.loads((out / "config.json").read_text())["quantization"]
    digests = {}
    for name, scales in tensors.items():
        if (path := name.removesuffix(".scales")) == name:
            continue
        said = {k: v for k, v in geometry(path, quantization).items() if k in mode("nvfp4")}
        biases, one = tensors.get(f"{path}.biases"), tensors.get(f"{path}.global_scale")
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        weight = tensors[f"{path}.weight"]
        if one is None:
            meant = mx.dequantize(weight, scales, biases, **said, dtype=mx.float32)
        else:
            pairs = zip(weight, scales, one, strict=True)
            meant = mx.stack(
                [mx.dequantize(w, s, **said, global_scale=g, dtype=mx.float32) for w, s, g in pairs]
            )
        values = np.array(meant, dtype=np.float32)
        digests[path] = hashlib.sha256(values.tobytes()).hexdigest()
    (out / "dequantised.json").write_text(json.dumps(digests, indent=0))


def plain_experts(module: Any) -> None:
    """Dequantise a block's experts that have a global scale, which MLX multiplies on GPUs alone."""
    for name, stack in module.children().items():
        if isinstance(stack, QuantizedSwitchLinear) and stack.global_scale is not None:
            experts = zip(stack.weight, stack.scales, stack.global_scale, strict=True)
            said = {**mode("nvfp4"), "dtype": mx.float32}
            plain = SwitchLinear(stack.input_dims, stack.output_dims, stack.num_experts, bias=False)
            plain.weight = mx.stack(
                [mx.dequantize(w, s, global_scale=g, **said) for w, s, g in experts]
            )
            module[name] = plain


def convert(source: Path, out: Path, rules: dict[str, Any], **default: Any) -> None:
    """Convert a checkpoint as `mlx_lm.convert` does; rules: patterns of paths -> their settings."""
    model, config = load_model(source, lazy=True)

    def rule(path: str, module: Any) -> Any:
        if module.weight.shape[-1] % 32:
            return False
        return next((said for part, said in rules.items() if re.search(part, path)), True)

    model, config = quantize_model(model, config, **default, quant_predicate=rule)
    save_model(out, model)
    (out / "model.safetensors.index.json").unlink()
    save_config(config, out / "config.json")
    write_digests(out)
    model.apply_to_modules(lambda _, module: plain_experts(module))
    model.set_dtype(mx.float32)  # scales and biases, too, which is exact
    logits = np.array(model(mx.array([PROMPT])), dtype=np.float64)[0]
    (out / "logits.json").write_text(json.dumps(logits.round(5).tolist()))


def random_source(folder: Path, family: str, **sizes: Any) -> Path:
    source = save_family(folder, family, make_family(family, **sizes), **sizes)
    halves = {
        name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(halves, source / "model.safetensors", metadata={"format": "pt"})
    return source


def without(source: Path, prefix: str) -> None:
    """Remove a head that the package does not remove."""
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    save_file(kept, source / "model.safetensors", metadata={"format": "pt"})


def as_published(source: Path) -> None:
    """Stack Qwen3.5's experts, and wrap the text model, as its repositories do."""
    tensors = load_file(source / "model.safetensors")
    names = [name for name in tensors if ".experts.0.up_proj" in name]
    for at in (name.partition("0.up_proj")[0] for name in names):
        each = range(QWEN["num_experts"])
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}{e}.{kind}_proj.weight") for e in each])
            for kind in ("gate", "up", "down")
        )
        tensors |= {f"{at}gate_up_proj": torch.cat([gate, up], 1), f"{at}down_proj": down}
    wrapped = {re.sub("^model.", "model.language_model.", n): t for n, t in tensors.items()}
    save_file(wrapped, source / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": json.loads((source / "config.json").read_text()),
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    data = Path(sys.argv[1])
    with TemporaryDirectory() as folder:
        source = random_source(Path(folder) / "deepseek", "kimi", **SIZES)
        without(source, "model.layers.2.")
        rules = {
            "q_a_proj": affine(8), "q_b_proj": affine(6), "kv_a": affine(5), "o_proj": affine(3),
            "layers.0.mlp.down_proj": affine(2, 64), "layers.0.mlp": affine(4, 64),
            "unembed_out": affine(8), "lm_head": False,
        }  # fmt: skip
        convert(source, data / "mlx_deepseek", rules, group_size=32, bits=4)
        source = random_source(Path(folder) / "glm", "glm-flash", **SIZES)
        split_glm4_moe_lite_mtp(str(source), str(data / "mlx_glm_head"), q_bits=4, q_group_size=32)
        write_digests(data / "mlx_glm_head")
        rules = {"embed_tokens": affine(8), "self_attn": mode("mxfp8")}
        convert(source, data / "mlx_glm", rules, mode="mxfp4", group_size=32, bits=4)
        source = random_source(Path(folder) / "qwen", "qwen3.5-moe", **QWEN)
        as_published(source)
        splitter = get_mtp_splitter("qwen3_5_moe")
        splitter.split(str(source), str(data / "mlx_qwen_head"))
        gates = {r"mlp\.gate$": affine(8, 64), "shared_expert_gate": affine(8, 64)}
        convert(
            source, data / "mlx_qwen", gates, mode="nvfp4", group_size=16, bits=4, global_scale=True
        )
