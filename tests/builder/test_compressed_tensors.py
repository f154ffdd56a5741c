"""Checkpoints that compressed-tensors wrote are read to the bit, and integers kept as they are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.builder.formats import Entry, Format, find_stored_format, make_entry
from mtpbuild.builder.formats.compressed_tensors import (
    dense,
    find_unread_setting,
    loose,
    unpack_stream,
)
from mtpbuild.builder.formats.fp8 import FP8
from mtpbuild.builder.formats.integers import INT4, INT8, MOVED
from mtpbuild.builder.formats.modelopt import find_unread_algorithm as unread_of_modelopt
from mtpbuild.builder.formats.mxfp4 import FP4
from mtpbuild.builder.formats.nvfp4 import NVFP4
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.runtime.errors import CheckpointError
from tests.support.engines import greedy_ids
from tests.support.fake_target import greedy_only
from tests.support.opened import opened
from tests.support.other_formats import WRITTEN, save_dequantised
from tests.support.requests import build, build_request

# Checkpoints that packages wrote, and the formats in which engines keep their weights.
KEPT: dict[str, set[Format]] = {
    "auto_round_awq": {MOVED[4]},
    "auto_round_gptq": {INT4},
    "autoawq": {MOVED[4]},
    "deepseek_mixed": {INT4, INT8, MOVED[8], FP8, NVFP4, FP4},
    "deepseek_w4a16": {INT4},
    "glm4_fp8_block": {FP8},
    "glm4_fp8_dynamic": set(),
    "qwen3_5_w8a8": {INT8},
}
MIXED = {
    "fp8 by tensor", "packed int8", "packed int4 with zero points", "nvfp4", "mxfp4",
    "packed int3", "packed int8 with zero points", "mxfp8", "int8 by row with zero points",
    "packed int5",
}  # fmt: skip
NAMES = {"deepseek_mixed": MIXED, "glm4_fp8_block": {"fp8", "fp8 by tensor"}}


@pytest.mark.parametrize("folder", KEPT)
def test_kept_weights(folder: str) -> None:
    """Integers, mxfp4, FP8 in blocks or by tensor keep their values; NVFP4 but for a bit."""
    checkpoint, seen = open_checkpoint(WRITTEN / folder), set[Format]()
    weights = [name for name in checkpoint.tensors if name.endswith(".weight")]
    formats = {name: f for name in weights if (f := checkpoint.format(name)) is not None}
    assert formats.keys() == json.loads((WRITTEN / folder / "dequantised.json").read_text()).keys()
    names = {format.name for format in formats.values()}
    assert names == NAMES.get(folder, names)
    floats = {format.name for format in formats.values() if format.engine_format is format}
    assert all(re.match("mx|packed int(5|4 with zero)|fp8 by row", name) for name in floats)
    for name, format in formats.items():
        if format.name in floats:
            continue
        kept, decoded = format.engine_format, checkpoint.read(name)
        parts = checkpoint.read_engine_parts(name)
        held = {suffix: make_entry(part) for suffix, part in parts.items()}
        assert held == kept.parts(tuple(decoded.shape))
        near = 2.0**-22 if kept is NVFP4 else 0
        torch.testing.assert_close(kept.decode(parts), decoded, rtol=near, atol=0)
        seen.add(kept)
    assert seen == KEPT[folder]


@pytest.mark.full
@pytest.mark.parametrize("folder", ["glm4_fp8_dynamic", "deepseek_mixed", "qwen3_5_w8a8"])
def test_an_engines_tokens(folder: str, tmp_path: Path) -> None:
    """A portable engine, in fp32, of each architecture: the dequantised checkpoint's tokens."""
    texts = []
    for model in (WRITTEN / folder, save_dequantised(WRITTEN / folder, tmp_path / "plain")):
        out = tmp_path / model.name
        out = out.with_suffix(".engine")
        with greedy_only():
            build(build_request(model, (1,), out=out, portable=True))
        texts.append(greedy_ids(out, [[5, 17, 3], [40, 2]], 12))
    assert texts[0] == texts[1]


def test_words() -> None:
    """Codes 0..7 in 4 bits; in 3 bits without spare bits, and ten to a word."""
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert unpack_stream(word, 4, 8, dense).tolist() == [[*range(8)]]
    codes = [i % 8 for i in range(32)]
    three = torch.tensor([[0x88, 0xC6, 0xFA] * 4], dtype=torch.uint8).view(torch.int32)
    assert unpack_stream(three, 3, 32, dense).tolist() == [codes]
    words = [sum(code << 3 * i for i, code in enumerate(codes[at : at + 10])) for at in (0, 10, 20)]
    words.append(codes[30] | codes[31] << 3)
    assert unpack_stream(torch.tensor([words], dtype=torch.int32), 3, 32, loose).tolist() == [codes]


def packed_entries(words: int, groups: int, rows: int = 2) -> dict[str, Entry]:
    return {
        "w": Entry("I32", (rows, words)), "w_scale": Entry("BF16", (rows, groups)),
        "w_shape": Entry("I64", (2,)),
    }  # fmt: skip


def make_settings(*groups: dict[str, Any]) -> dict[str, Any]:
    named = {f"group_{i}": {"targets": ["Linear"], "weights": g} for i, g in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named}


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_zero_points_of_one_word(rows: int) -> None:
    """Rows of at most a word, as those of a shared expert's gate, have a column of zero points."""
    zeros = torch.arange(rows * 4).view(rows, 4) % 16
    words = torch.zeros(-(-rows // 8), 4, dtype=torch.int64)
    for row in range(rows):
        words[row // 8] |= zeros[row] << 4 * (row % 8)
    stored = (words - (words >> 31 << 32)).int()
    assert torch.equal(unpack_stream(stored.T, 4, rows, dense).T, zeros.byte())


def test_odd_widths() -> None:
    """Both packings are told by the words of a row; where they don't tell, it is refused."""
    output = make_settings({"num_bits": 3, "group_size": 32, "symmetric": True})
    for words in (dense(32, 3), loose(32, 3)):
        format = find_stored_format("w", packed_entries(words, 1), output)
        assert format is not None
        assert format.fits((2, 32))
        assert format.parts((2, 32))[""].shape == (2, words)
    codes = torch.tensor([[i % 8 for i in range(32)]] * 2)
    values = []
    for row in ([0x88FAC688 - 2**32, 0xC688FAC6 - 2**32, 0xFAC688FA - 2**32],
                [sum(int(c) << 3 * i for i, c in enumerate(codes[0, at : at + 10]))
                 for at in range(0, 32, 10)]):  # fmt: skip
        parts = {
            "": torch.tensor([row, row], dtype=torch.int32), "_shape": torch.tensor([2, 32]),
            "_scale": torch.tensor([[0.5], [2.0]]).bfloat16(),
        }  # fmt: skip
        format = find_stored_format("w", packed_entries(len(row), 1), output)
        assert format is not None
        values.append(format.decode(parts))
        assert torch.equal(
            format.engine_format.decode(format.to_engine_format("w", parts)), values[-1]
        )
    assert torch.equal(values[0], (codes - 4) * torch.tensor([[0.5], [2.0]]))
    assert torch.equal(*values)
    unclear = make_settings({"num_bits": 3, "group_size": 24, "symmetric": True})
    format = find_stored_format("w", packed_entries(dense(24, 3), 1), unclear)
    assert format is not None
    assert dense(24, 3) == loose(24, 3)
    assert not format.fits((2, 24))


def test_columns_in_another_order() -> None:
    """With actorder, weight_g_idx says which group a column belongs to; such are not kept."""
    output = make_settings(
        {"num_bits": 4, "group_size": 32, "symmetric": True, "actorder": "group"}
    )
    entries = packed_entries(8, 2) | {"w_g_idx": Entry("I32", (64,))}
    format = find_stored_format("w", entries, output)
    assert format is not None
    assert format.engine_format is format
    order = torch.arange(64, dtype=torch.int32).flip(0) % 2
    parts = {
        "": torch.full((2, 8), 0x76543210, dtype=torch.int32), "_shape": torch.tensor([2, 64]),
        "_scale": torch.tensor([[1.0, 8.0], [0.5, 4.0]]).bfloat16(), "_g_idx": order,
    }  # fmt: skip
    wanted = (torch.arange(64) % 8 - 8.0) * parts["_scale"].float()[:, order]
    assert torch.equal(format.decode(parts), wanted)
    assert format.fault(parts) is None
    none = format.decode(parts | {"_g_idx": torch.full((64,), -1)})
    in_turn = parts["_scale"].float().repeat_interleave(32, 1)
    assert torch.equal(none, (torch.arange(64) % 8 - 8.0) * in_turn)
    assert "beyond its 2 groups" in str(format.fault(parts | {"_g_idx": order + 1}))


def test_scales_that_fp16_lacks() -> None:
    """Codes stay and scales are rounded, where that is closer than quantising again."""
    values = torch.arange(64).reshape(1, 64) % 16 - 8
    held = INT4.hold("w", values, torch.tensor([[0.1, 3e-3]]))
    wide = held["_scale"].float().repeat_interleave(32, 1)
    assert torch.equal(INT4.decode(held), values * wide)
    with pytest.raises(CheckpointError, match="but int4 ends at"):
        INT4.hold("w", values, torch.tensor([[1e6, 1.0]]))


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
def test_deepseeks_blocks_with_short_scales(scales: torch.dtype) -> None:
    """Qwen's FP8 has scales in bf16; engines keep them in fp32, which is exact."""
    torch.manual_seed(0)
    parts = FP8.encode(torch.randn(130, 200))
    parts["_scale_inv"] = parts["_scale_inv"].to(scales)
    format = find_stored_format(
        "w", {f"w{suffix}": make_entry(part) for suffix, part in parts.items()}
    )
    assert format is not None
    assert format.engine_format is FP8
    kept = format.to_engine_format("w", parts)
    assert kept["_scale_inv"].dtype == torch.float32
    assert torch.equal(FP8.decode(kept), format.decode(parts))
    wide = (
        parts[""].float()
        * parts["_scale_inv"]
        .float()
        .repeat_interleave(128, 0)[:130]
        .repeat_interleave(128, 1)[:, :200]
    )
    assert torch.equal(format.decode(parts), wide)


def test_int4_of_modelopt() -> None:
    """A byte holds two rows' values in two's complement; pre_quant_scale multiplies columns."""
    torch.manual_seed(0)
    values = torch.randint(-8, 8, (4, 64), dtype=torch.int8)
    scales = torch.rand(4, 2).half().float()
    packed = ((values[0::2] & 0xF) | (values[1::2] & 0xF) << 4).view(torch.uint8)
    parts = {"": packed, "_scale": scales}
    entries = {f"w{suffix}": make_entry(part) for suffix, part in parts.items()}
    format, wanted = find_stored_format("w", entries), values * scales.repeat_interleave(32, 1)
    assert format is not None
    assert format.parts((4, 64)) == {"": entries["w"], "_scale": entries["w_scale"]}
    assert torch.equal(format.decode(parts), wanted)
    assert torch.equal(INT4.decode(format.to_engine_format("w", parts)), wanted)
    inputs = torch.rand(64)
    format = find_stored_format("w", entries | {"w_pre_quant_scale": make_entry(inputs)})
    assert format is not None
    assert format.engine_format is format
    assert torch.equal(format.decode(parts | {"_pre_quant_scale": inputs}), wanted * inputs)


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)])
def test_fp8_of_modelopt(shape: tuple[int, ...]) -> None:
    values, scales = torch.randn(6, 40).to(torch.float8_e4m3fn), torch.rand(shape)
    entries = {"w": make_entry(values), "w_scale": make_entry(scales)}
    format = find_stored_format("w", entries)
    assert format is not None
    assert format.parts((6, 40)) == {"": entries["w"], "_scale": entries["w_scale"]}
    wide = scales.reshape(-1, 1) if scales.numel() > 1 else scales.reshape(1, 1)
    assert torch.equal(format.decode({"": values, "_scale": scales}), values.float() * wide)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"format": "pack-quantized"}, None),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"format": "sparse-24-bitmask"}, "sparse-24-bitmask"),
        ({"format": "dense", "sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
        ({"format": "mixed-precision", "config_groups": {"a": {"format": "mxfp6-pack-quantized"}}},
         "mxfp6-pack-quantized"),
        ({"transform_config": {"config_groups": {"r": {}}}}, "with transform_config"),
    ],
)  # fmt: skip
def test_what_is_not_read(settings: dict[str, Any], says: str | None) -> None:
    assert find_unread_setting(settings) == (says and f"compressed-tensors {says}")


def test_what_is_not_read_of_modelopt() -> None:
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert unread_of_modelopt(mixed) is None
    layers["c"] = {"quant_algo": "FP8_PB_WO"}
    assert unread_of_modelopt(mixed) == "modelopt FP8_PB_WO"


def test_targets_are_asked_where_shapes_do_not_tell() -> None:
    """Two groups by row differ in bits alone: a row's words don't tell how many columns it has."""
    output = make_settings(
        {"num_bits": 4, "strategy": "channel"}, {"num_bits": 8, "strategy": "channel"}
    )
    output["config_groups"]["group_1"]["targets"] = ["re:.*down_proj"]
    for name, bits in (("a.down_proj.weight", 8), ("a.up_proj.weight", 4)):
        entries = {key.replace("w", name, 1): e for key, e in packed_entries(8, 1).items()}
        format = find_stored_format(name, entries, output)
        assert format is not None
        assert format.bits == bits


def test_opened_with_kernels() -> None:
    """The engine's table keeps the products that the CPU's kernels read."""
    from mtpbuild.builder.targets.onnxruntime.pipeline import CPU

    model = opened(WRITTEN / "deepseek_w4a16", formats=("int8", "int4"), pipeline=CPU)
    assert {f.name for n, f in model.table.formats.items() if n.endswith("o_proj")} == {"int4"}
