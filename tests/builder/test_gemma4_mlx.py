"""Gemma-4 in MLX's files: experts in stacks, products in bits of their own."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpbuild.lab.verify.plain import load_plain
from tests.support.gemma4 import make_trunk, save

GROUP = 32
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16,
    "global_head_dim": 32,
}  # fmt: skip
# Parts of a tensor of transformers in MLX's files: the rows of gate and up lie in two stacks.
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def pack(weight: Tensor, bits: int) -> tuple[dict[str, Tensor], Tensor]:
    """Quantise a weight [.., out, in] as MLX does; return what is stored, and its values."""
    groups = weight.unflatten(-1, (-1, GROUP))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    scales = (most - least).clamp(min=1e-6) / (2**bits - 1)  # the padding token has a row of zeros
    codes = ((groups - least) / scales).round()
    fields = codes.long().flatten(-2).unflatten(-1, (-1, 32 // bits))
    words = (fields << torch.arange(32 // bits) * bits).sum(-1).to(torch.uint32)
    parts = {"weight": words, "scales": scales.squeeze(-1), "biases": least.squeeze(-1)}
    return parts, (codes * scales + least).flatten(-2)


def write_mlx(trunk: Any, folder: Path) -> None:
    """Write a trunk as MLX has it; the trunk gets the values that this leaves."""
    rules: dict[str, Any] = {"bits": 4, "group_size": GROUP}
    stored, values = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in trunk.state_dict().items():
        at = f"language_model.{name.removesuffix('.weight')}"
        if "proj" not in name and "embed" not in name:
            stored[f"language_model.{name}"] = tensor
            continue
        path, _, leaf = at.rpartition(".")
        kinds = STACKS[leaf] if path.endswith(".experts") else ()
        names = [f"{path}.switch_glu.{kind}" for kind in kinds] or [at]
        bits = 8 if leaf == "proj" else 4  # the router
        rules |= {at: {"bits": bits, "group_size": GROUP}} if bits == 8 else {}
        packed = [pack(part, bits) for part in tensor.chunk(len(names), dim=-2)]
        values[name] = torch.cat([value for _, value in packed], dim=-2)
        for stack, (parts, _) in zip(names, packed, strict=True):
            stored |= {f"{stack}.{kind}": part.contiguous() for kind, part in parts.items()}
    trunk.load_state_dict(values, strict=False)
    config = save(trunk, folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization": rules}))
    stored.pop("language_model.lm_head.weight", None)
    save_file(stored, folder / "model.safetensors")


@torch.no_grad()
def test_a_mixture_of_mlx(tmp_path: Path) -> None:
    trunk = make_trunk("mixture", **SIZES)
    write_mlx(trunk, tmp_path / "mlx")
    plain, tokens = load_plain(tmp_path / "mlx"), torch.arange(30)[None]
    torch.testing.assert_close(
        plain.logits(plain.main(tokens)), trunk(tokens).logits, rtol=1e-4, atol=1e-4
    )
