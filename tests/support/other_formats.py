"""Small checkpoints in other projects' formats: written by their packages, or by formulas."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import SINGLE
from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.files import open_checkpoint
from tests.support.families import make_config, make_family
from tests.support.gguf_files import (
    assert_equal_weights,
    open_gguf,
    random_tensors,
    usual,
    write_gguf,
)

WRITTEN = Path(__file__).parents[1] / "data" / "checkpoints"
E4M3 = torch.float8_e4m3fn
STEPS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Parts = dict[str, Tensor]
# A weight [out, in] -> its tensors by the end of their name, and the values that they stand for.
Encode = Callable[[Tensor], tuple[Parts, Tensor]]


@dataclass(frozen=True)
class Written:
    """A checkpoint, and a check that its weights are read as its writer means them."""

    folder: Path
    check: Callable[[], None]


Write = Callable[[Path], Written]


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def pack_words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Pack numbers into int32 words along an axis, the lowest bits first."""
    fields = codes.long().movedim(dim, -1).unflatten(-1, (-1, 32 // bits))
    packed = (fields << torch.arange(0, 32, bits)).sum(-1)
    signed = torch.where(packed >= 2**31, packed - 2**32, packed)
    return signed.int().movedim(-1, dim).contiguous()


def by_package(name: str) -> Write:
    """Take a checkpoint that a package wrote, with digests of what it dequantises."""

    def check() -> None:
        checkpoint = open_checkpoint(WRITTEN / name)
        meant = json.loads((WRITTEN / name / "dequantised.json").read_text())
        wrong = [each for each, wanted in meant.items() if digest(checkpoint.read(each)) != wanted]
        assert not wrong

    return lambda place: Written(WRITTEN / name, check)


def by_formulas(
    family: str, sizes: dict[str, Any], settings: dict[str, Any], *encode: Encode
) -> Write:
    """Write a random model whose projections are encoded in turn."""

    def write(place: Path) -> Written:
        tensors, meant = dict[str, Tensor](), dict[str, Tensor]()
        for name, weight in make_family(family, **sizes).state_dict().items():
            if weight.dim() != 2 or "_proj" not in name or "eh_proj" in name or "_proj_" in name:
                tensors[name] = weight.clone()
                continue
            parts, meant[name] = encode[len(meant) % len(encode)](weight)
            module = name.removesuffix("weight")
            tensors |= {module + end: part.contiguous() for end, part in parts.items()}
        place.mkdir(parents=True)
        config = make_config(family, **sizes) | {"quantization_config": settings}
        (place / "config.json").write_text(json.dumps(config))
        save_file(tensors, place / SINGLE)

        def check() -> None:
            checkpoint = open_checkpoint(place)
            assert [n for n, v in meant.items() if not torch.equal(checkpoint.read(n), v)] == []

        return Written(place, check)

    return write


def by_gguf(family: str, kind: str) -> Write:
    """Write a GGUF file by the package `gguf`, its head inside."""

    def write(place: Path) -> Written:
        c, tensors = random_tensors(family)
        path = write_gguf(place.with_suffix(".gguf"), c, tensors, usual(Type[kind]))
        folder = find_model(str(path)).folder
        return Written(folder, lambda: assert_equal_weights(path, c, open_gguf(path)))

    return write


def fp8_blocks(scales: torch.dtype) -> Encode:
    """Encode in blocks of 128 x 128, of which small weights have one."""

    def encode(weight: Tensor) -> tuple[Parts, Tensor]:
        assert max(weight.shape) <= 128
        scale = (weight.abs().amax() / 448).reshape(1, 1).to(scales)
        values = (weight / scale.float()).to(E4M3)
        return {"weight": values, "weight_scale_inv": scale}, values.float() * scale.float()

    return encode


def fp8_scaled(rows: bool) -> Encode:
    """Encode with a scale for the whole weight, or for each row [N]."""

    def encode(weight: Tensor) -> tuple[Parts, Tensor]:
        largest = weight.abs().amax(1) if rows else weight.abs().amax()
        scale = largest / 448
        wide = scale[:, None] if rows else scale
        values = (weight / wide).to(E4M3)
        parts = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
        return parts, values.float() * wide

    return encode


def int4_pairs(weight: Tensor) -> tuple[Parts, Tensor]:
    """Encode as ModelOpt's int4: two rows in a byte, groups of 32, inputs that are scaled."""
    inputs = torch.linspace(0.5, 2, weight.shape[1])
    groups = (weight / inputs).unflatten(1, (-1, 32))
    scale = groups.abs().amax(-1) / 7
    values = (groups / scale[..., None]).round().to(torch.int8)
    meant = (values.float() * scale[..., None]).flatten(1) * inputs
    low, high = values.flatten(1)[0::2], values.flatten(1)[1::2]
    packed = ((low & 15) | (high & 15) << 4).view(torch.uint8)
    return {"weight": packed, "weight_scale": scale, "pre_quant_scale": inputs}, meant


def nvfp4(weight: Tensor) -> tuple[Parts, Tensor]:
    """Encode as ModelOpt's NVFP4: e2m1 times an e4m3 scale for 16 columns, times one in fp32."""
    second = weight.abs().amax() / (448 * 6)
    groups = weight.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / (6 * second)).to(E4M3)
    sized = groups.abs() / (scale.float() * second)[..., None]
    codes = (sized[..., None] - STEPS).abs().argmin(-1)
    values = (STEPS[codes] * groups.sign()).flatten(1)
    codes = (codes + 8 * (groups < 0)).flatten(1).byte()
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    exact = values.unflatten(1, (-1, 16)) * scale.float()[..., None]  # rounded once, after it
    meant = (exact * second).flatten(1)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": second}, meant


KIMI: dict[str, Any] = {
    "vocab_size": 41, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 4,
    "v_head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
GLM: dict[str, Any] = {
    "vocab_size": 41, "hidden_size": 64, "head_dim": 16, "n_routed_experts": 3,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "vocab_size": 41, "hidden_size": 64, "num_hidden_layers": 2, "full_attention_interval": 2,
}  # fmt: skip
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}}
FORMATS: dict[str, Write] = {
    # MLX's, whose names differ, have tests of their own.
    **{p.name: by_package(p.name) for p in sorted(WRITTEN.iterdir()) if p.name[:3] != "mlx"},
    "fp8 f32": by_formulas("kimi", KIMI, BLOCKS, fp8_blocks(torch.float32)),
    "fp8 f16": by_formulas("glm-4.6", GLM, BLOCKS, fp8_blocks(torch.float16)),
    "fp8 bf16": by_formulas("qwen3.5", QWEN, BLOCKS, fp8_blocks(torch.bfloat16)),
    "modelopt": by_formulas(
        "kimi", KIMI, MODELOPT, fp8_scaled(rows=False), fp8_scaled(rows=True), int4_pairs, nvfp4
    ),
    "gguf Q4_1": by_gguf("qwen3.5", "Q4_1"),
    "gguf Q5_1": by_gguf("gigachat", "Q5_1"),
    "gguf MXFP4": by_gguf("glm-air", "MXFP4"),
}


def save_dequantised(folder: Path, place: Path) -> Path:
    """Save a checkpoint in fp32, under the names of transformers."""
    checkpoint = open_checkpoint(folder)
    table = checkpoint.check(checkpoint.settle(load_config(folder)))
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    tensors = {name: checkpoint.read(name).contiguous() for name in table.stored}
    save_file(tensors, place / SINGLE, metadata={"format": "pt"})
    return place
