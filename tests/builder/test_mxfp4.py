"""mxfp4 stays in 4 bits on CPUs; DeepSeek-V4's way to store it, and its FP8, are read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpbuild.builder.compiler.notes import describe_formats, list_notes
from mtpbuild.builder.formats import Format, find_stored_format, make_entry, name_own
from mtpbuild.builder.formats.fp8 import FP8
from mtpbuild.builder.formats.integers import INT8, MOVED, count_coarse_blocks, join_integers
from mtpbuild.builder.formats.mxfp4 import FP4
from mtpbuild.builder.formats.nvfp4 import pack
from mtpbuild.builder.formats.scaled import ScaledValues
from mtpbuild.builder.models.common.blocks import PackedExperts
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.builder.targets.onnxruntime import OnnxRuntime
from mtpbuild.builder.weights.checkpoint import choose_read_format
from mtpbuild.plugins.cpu.layout import multiply_scales
from mtpbuild.plugins.product_packed.op import unpacked
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest
from tests.support.checkpoints import QUANTIZABLE, make_predictable, save_checkpoint
from tests.support.numbers import check_rounded, plain_with_rounding, played
from tests.support.opened import load_model, opened
from tests.support.requests import build

NUMBERS = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
E8M0 = torch.float8_e8m0fnu
V4 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
MANY = QUANTIZABLE | {"n_routed_experts": 24, "num_experts_per_tok": 3}  # chosen ones are gathered
PROMPTS = [[5, 17, 3], [40, 2], [9, 9, 33, 21, 60]]
Tensors = dict[str, Tensor]


def read_parts(tensors: Mapping[str, Tensor]) -> tuple[Format, Tensors]:
    """Return the format of weight `x`, and its parts, by a checkpoint's own names."""
    entries = {f"x.{name}": make_entry(tensor) for name, tensor in tensors.items()}
    named = {name_own(name, entry.dtype): name for name, entry in entries.items()}
    format = find_stored_format("x.weight", {n: entries[old] for n, old in named.items()}, V4)
    assert format is not None
    suffixes = {suffix: named[f"x.weight{suffix}"] for suffix in format.suffixes}
    return format, {suffix: tensors[old[2:]] for suffix, old in suffixes.items()}


def draw_experts(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw bytes of two codes [rows, columns / 2], exponents, and what they mean in fp64."""
    drawn = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=drawn, dtype=torch.uint8)
    exponents = torch.randint(0, 250, (rows, columns // 32), generator=drawn, dtype=torch.uint8)
    numbers = torch.tensor(NUMBERS, dtype=torch.float64)
    even, odd = numbers[(codes & 15).int()], numbers[(codes >> 4).int()]
    scales = torch.exp2(exponents.double() - 127).repeat_interleave(32, dim=1)
    return codes, exponents, torch.stack([even, odd], dim=-1).flatten(1) * scales


@pytest.mark.parametrize("codes", [torch.uint8, torch.int8])
@pytest.mark.parametrize("scales", [torch.uint8, E8M0])
@pytest.mark.parametrize("suffix", ["scale", "weight_scale"])
def test_experts_of_deepseek_v4(codes: torch.dtype, scales: torch.dtype, suffix: str) -> None:
    """Each scale is exact, also those that fp16 lacks, as in the engine."""
    stored, exponents, meant = draw_experts(5, 96)
    tensors = {"weight": stored.view(codes), suffix: exponents.view(scales)}
    format, parts = read_parts(tensors)
    assert (format.name, format.engine_format) == ("mxfp4", FP4)
    assert {s: make_entry(part) for s, part in parts.items()} == format.parts((5, 96))
    assert format.fault(parts) is None
    assert torch.equal(format.decode(parts).double(), meant)
    held = format.to_engine_format("x", parts)
    assert {s: make_entry(part) for s, part in held.items()} == FP4.parts((5, 96))
    assert torch.equal(FP4.decode(held).double(), meant)
    values, powers = (FP4.pack(s, part) for s, part in held.items())
    assert torch.equal(unpacked(values, powers, 5).double(), meant)
    assert sum(part.nbytes for part in held.values()) * 8 == 4.25 * meant.numel()
    tensors[suffix] = torch.full_like(exponents, 255).view(scales)
    format, parts = read_parts(tensors)
    faults = format.fault(parts), FP4.fault(format.to_engine_format("x", parts))
    assert faults == ("holds NaN or Inf",) * 2


@pytest.mark.parametrize("shape", [(256, 384), (200, 160)])
def test_blocks_of_deepseek_v4(shape: tuple[int, int]) -> None:
    """FP8 in blocks of 128 x 128 with powers of two; engines keep it as they keep fp8."""
    drawn = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=drawn).to(torch.float8_e4m3fn)
    grid = tuple(-(-size // 128) for size in shape)
    exponents = torch.randint(100, 140, grid, generator=drawn, dtype=torch.uint8)
    format, parts = read_parts({"weight": values, "scale": exponents.view(E8M0)})
    meant = values.double()
    for n in range(grid[0]):
        for k in range(grid[1]):
            block = slice(128 * n, 128 * n + 128), slice(128 * k, 128 * k + 128)
            meant[block] *= 2.0 ** (int(exponents[n, k]) - 127)
    assert (format.name, format.engine_format) == ("fp8", FP8)
    assert torch.equal(format.decode(parts).double(), meant)
    assert torch.equal(FP8.decode(format.to_engine_format("x", parts)).double(), meant)


def test_other_weights_with_powers() -> None:
    """Signed bytes with a power for 32 of them are no codes; `scale` in floats has its own name."""
    weight, exponents = torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, 2, dtype=torch.uint8)
    format, _ = read_parts({"weight": weight, "scale": exponents})
    assert isinstance(format, ScaledValues)
    assert name_own("x.router.scale", "BF16") == name_own("x.router.scale") == "x.router.scale"


def test_beside_other_formats() -> None:
    """Products that join mxfp4 with integers are rounded to int8, as they were."""
    for other in (INT8, MOVED[4], MOVED[8]):
        assert join_integers((FP4, other), (32, 32)) is INT8
    assert choose_read_format(FP4, INT8) is INT8
    assert choose_read_format(FP4, FP4) is FP4
    assert count_coarse_blocks(torch.zeros(2, 3, 16, dtype=torch.float16) + 2.0**-24) == 0


def test_powers_that_balance_keys() -> None:
    exponents = torch.tensor([[[127], [0]], [[254], [3]]], dtype=torch.uint8)
    multiplied = multiply_scales(exponents, torch.tensor([0.25, 8.0]))
    assert multiplied.tolist() == [[[125], [0]], [[254], [6]]]


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to mxfp4: codes, and exponents that make the largest number 4 to 8."""
    blocks = weight.float().unflatten(1, (-1, 32))
    exponents = blocks.abs().amax(-1).log2().floor() - 2
    values = (blocks / torch.exp2(exponents)[..., None]).clamp(-6, 6)
    return pack(values.flatten(1)), (exponents + 127).to(torch.uint8)


def save_mixed(folder: Path, fp8: str = ".layers.0.mlp.") -> Path:
    """Save a model with routed experts as DeepSeek-V4 has them; fp8: in FP8 weights' names."""
    save_checkpoint(folder, make_predictable(**MANY), **MANY)
    tensors = load_file(folder / "model.safetensors")
    for name in [*tensors]:
        module = name.removesuffix(".weight")
        if ".experts." in name and module != name:
            codes, exponents = encode(tensors[name])
            tensors |= {name: codes.view(torch.int8), f"{module}.scale": exponents.view(E8M0)}
        elif fp8 in name:
            grid = [-(-size // 128) for size in tensors[name].shape]
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            powers = torch.full(grid, 127, dtype=torch.uint8)
            tensors[f"{module}.scale"] = powers.view(E8M0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": V4, "expert_dtype": "fp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_mixed(tmp_path_factory.mktemp("mixed") / "model")


def test_experts_stay_in_fp4(mixed: Path, tmp_path: Path) -> None:
    """What an engine holds of them equals the file's values; other weights are as they were."""
    target = OnnxRuntime()
    model = opened(mixed, formats=target.style.formats, pipeline=target.style.pipeline,
                   rounds_to="int8")  # fmt: skip
    held = {name: format.name for name, format in model.table.formats.items()}
    leaves = ("gate_up_proj", "down_proj")
    dense = {f"layers.0.mlp.{leaf}" for leaf in leaves}
    fours = {f"{at}.mlp.{leaf}" for at in ("layers.1", "mtp.0") for leaf in leaves}
    assert held == dict.fromkeys(dense, "int8") | dict.fromkeys(fours, "mxfp4")
    EngineWeights(model).write(tmp_path, siblings=None)
    model.model.load_state_dict(load_file(tmp_path / WEIGHTS), assign=True)
    whole = load_model(mixed, model.config)
    for name in fours:
        module = model.model.get_submodule(name)
        assert isinstance(module, PackedExperts)
        weight = unpacked(module.values, module.scales, module.outputs).mT
        if name.endswith("gate_up_proj"):  # panels of gates and ups alternate
            weight = weight.unflatten(-1, (-1, 2, 32)).transpose(-3, -2).flatten(-3)
        assert torch.equal(weight, whole.get_parameter(name))
    assert "trunk mxfp4, held in mxfp4; " in describe_formats(model)
    assert [*list_notes(model)] == []  # nothing is dequantised
    assert len(model.rounded()) == 3


def test_an_engine(tmp_path: Path) -> None:
    """It says what the dequantised model says whose products round their inputs to int8."""
    mixed = save_mixed(tmp_path / "model", "none")
    (built,) = build(BuildRequest(str(mixed), nextn=(1,), max_seq_len=64, out=tmp_path / "e"))
    manifest = read_manifest(built.folder)
    assert (manifest.build.weights, manifest.build.exact) == ("mxfp4", True)
    check_rounded(plain_with_rounding(mixed), PROMPTS, played(built.folder, PROMPTS))
