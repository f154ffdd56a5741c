"""Damaged and contradictory checkpoints of every format end in a line: what is wrong, and where."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import SINGLE
from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.runtime.errors import CheckpointError
from tests.support.other_formats import FORMATS, WRITTEN

Tensors = dict[str, Tensor]
Change = Callable[[Tensors, dict[str, Any]], Any]
O = "model.layers.0.self_attn.o_proj"  # noqa: E741
DOWN = "model.layers.0.mlp.down_proj"
UP = "model.layers.1.mlp.switch_mlp.up_proj"
Q = "model.layers.1.self_attn.embed_q"


def group(**weights: Any) -> Change:
    """Change the settings of compressed-tensors' first group."""
    return lambda t, settings: settings["config_groups"]["group_0"]["weights"].update(weights)


def alter(**changes: Any) -> Change:
    return lambda t, settings: settings.update(changes)


def without(name: str) -> Change:
    return lambda t, settings: t.pop(name)


def cut(name: str) -> Change:
    """Drop a tensor's last row."""
    return lambda t, settings: t.update({name: t[name][:-1].contiguous()})


def filled(name: str, value: Any) -> Change:
    return lambda t, settings: t[name].fill_(value)


def order(dtype: torch.dtype) -> Change:
    """Add an order of the inputs, to a group that isn't there."""
    return lambda t, settings: t.update({f"{O}.g_idx": torch.full((32,), 9, dtype=dtype)})


# A checkpoint, what is changed, and what the line says.
DAMAGED: dict[str, tuple[str, Change, str]] = {
    "packed: no scale": ("deepseek_w4a16", without(f"{O}.weight_scale"), f"missing .*{O}"),
    "packed: no shape": ("deepseek_w4a16", without(f"{O}.weight_shape"), f"missing .*{O}"),
    "packed: no zero points": ("deepseek_w4a16", group(symmetric=False), "missing .*_zero_point"),
    "packed: no order": ("deepseek_w4a16", group(actorder="group"), "missing tensor .*_g_idx"),
    "packed: group": ("deepseek_w4a16", group(group_size=48), "does not split into the blocks"),
    "packed: bits": ("deepseek_w4a16", group(num_bits=8), "has shape .* makes it"),
    "packed: another shape": (
        "deepseek_w4a16",
        lambda t, s: t.update({f"{O}.weight_shape": t[f"{O}.weight_shape"] + 8}),
        "o_proj.weight is packed in .*weight_shape says",
    ),
    "packed: words": ("deepseek_w4a16", cut(f"{O}.weight_packed"), f"{O}.weight has shape"),
    "fp8 by row: fewer scales": ("glm4_fp8_dynamic", cut(f"{DOWN}.weight_scale"), "has shape"),
    "fp8 blocks: scales": (
        "glm4_fp8_block",
        lambda t, s: t.update({f"{DOWN}.weight_scale": torch.ones(7, 2).bfloat16()}),
        "weight_scale has shape",
    ),
    "int8: no zero points": ("qwen3_5_w8a8", group(symmetric=False), "missing .*_zero_point"),
    "int8: no scale": ("qwen3_5_w8a8", without(f"{DOWN}.weight_scale"), "down_proj.weight is I8"),
    "fp8: no scale": ("fp8 bf16", without(f"{DOWN}.weight_scale_inv"), "is F8_E4M3; supported"),
    "fp8: fewer scales": ("fp8 f32", cut(f"{O}.weight_scale_inv"), "_scale_inv has shape"),
    "fp8: Inf": ("fp8 f32", filled(f"{O}.weight_scale_inv", torch.inf), "holds NaN or Inf"),
    "fp8: a value of NaN": (
        "fp8 f32", lambda t, s: t[f"{O}.weight"].view(torch.uint8)[3, 5].fill_(0x7F), "NaN or Inf",
    ),
    "fp8: blocks": ("fp8 f32", alter(weight_block_size=[64, 64]), "weight_block_size .* not read"),
    "modelopt: unknown": ("modelopt", alter(quant_algo="FP8_PB_WO"), "modelopt FP8_PB_WO are not"),
    "awq: no zero points": ("autoawq", without(f"{O}.qzeros"), f"missing tensor {O}.weight_qzeros"),
    "awq: no scales": ("autoawq", without(f"{O}.scales"), f"missing tensor {O}.weight_scales"),
    "awq: group": ("autoawq", alter(group_size=64), "has shape .* makes it"),
    "awq: words": ("autoawq", cut(f"{O}.qweight"), f"{O}.weight has shape"),
    "awq: layout": ("autoawq", alter(version="gemv"), "awq in the layout gemv are not read"),
    "awq: bits": ("autoawq", alter(bits=8), "awq with 8 bits are not read"),
    "auto-round's awq: scales": ("auto_round_awq", cut(f"{O}.scales"), "has shape"),
    "auto-round's awq: packing": (
        "auto_round_awq", alter(packing_format="auto_round:auto_gptq"), "has shape .* makes it",
    ),
    "gptq: no zero points": ("auto_round_gptq", without(f"{O}.qzeros"), "missing .*qzeros"),
    "gptq: group": ("auto_round_gptq", alter(group_size=128), "has shape .* makes it"),
    "gptq: version": ("auto_round_gptq", alter(packing_format="auto_round"), "zero points other"),
    "gptq: order": ("auto_round_gptq", order(torch.int32), "has g_idx from 9 to 9"),
    "gptq: types": ("auto_round_gptq", order(torch.int64), "is I64, .* needs I32"),
    "a layer less": ("autoawq", without(f"{O}.qweight"), f"missing tensor {O}.weight"),
    "a layer more": (
        "autoawq",
        lambda t, s: t.update({"model.layers.9.mlp.up_proj.qweight": t[f"{O}.qweight"] + 0}),
        "does not have: model.layers.9",
    ),
    "mlx: no scales": ("mlx_deepseek", without(f"{O}.scales"), "missing tensor .*weight_scales"),
    "mlx: no biases": ("mlx_deepseek", without(f"{O}.biases"), "missing tensor .*weight_biases"),
    "mlx: no biases of experts": (
        "mlx_deepseek", without(f"{UP}.biases"),
        "missing tensor model.layers.1.mlp.experts.0.up_proj.weight_biases",
    ),
    "mlx: no heads' values": (
        "mlx_deepseek", without("model.layers.1.self_attn.unembed_out.weight"),
        "missing tensor model.layers.1.self_attn.unembed_out.0.weight",
    ),
    "mlx: no heads' scales": (
        "mlx_deepseek", without(f"{Q}.scales"), "missing tensor .*embed_q.0.weight_sc",
    ),
    "mlx: group": (
        "mlx_deepseek", lambda t, s: s[O].update(group_size=16, bits=6), f"{O}.weight has shape",
    ),
    "mlx: group of heads": (
        "mlx_deepseek", lambda t, s: t.update({f"{Q}.scales": t[f"{Q}.scales"].repeat(1, 1, 2)}),
        "embed_q.0.weight.* has shape",
    ),
    "mlx: bits": ("mlx_glm", cut(f"{O}.weight"), "o_proj.weight has shape"),
    "mlx: scales": ("mlx_glm", cut(f"{O}.scales"), "_scales has shape"),
}  # fmt: skip


def read_all(folder: Path) -> None:
    """Open a checkpoint as a build does, and read all that it needs."""
    folder = find_model(str(folder)).folder
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.check(checkpoint.settle(load_config(folder), drafts=False)).stored:
        checkpoint.read(name)


@pytest.mark.parametrize("what", DAMAGED)
def test_damage_ends_in_a_line(what: str, tmp_path: Path) -> None:
    name, change, says = DAMAGED[what]
    folder = tmp_path / "damaged"
    whole = WRITTEN / name if name.startswith("mlx") else FORMATS[name](tmp_path / "whole").folder
    shutil.copytree(whole, folder)
    tensors, config = load_file(folder / SINGLE), json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization" if name.startswith("mlx") else "quantization_config"])
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says) as error:
        read_all(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("name", FORMATS)
def test_cut_files(name: str, tmp_path: Path) -> None:
    """A file that ends early says how to resume, and which it is."""
    written = FORMATS[name](tmp_path / "whole")
    folder = shutil.copytree(written.folder, tmp_path / "cut")
    (file,) = (each for each in folder.iterdir() if each.suffix in (".safetensors", ".gguf"))
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-1000])
    with pytest.raises(CheckpointError, match="resume the download") as error:
        read_all(folder)
    assert "\n" not in str(error.value)
    assert file.stem in str(error.value)
