"""Oracle O9: quantised weights against their formulas, byte by byte and block by block."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpbuild.builder.checkpoint.readable import name_stored_format, refuse_quantised
from mtpbuild.builder.formats import (
    FORMATS,
    METHODS,
    Entry,
    find_stored_format,
    refuse_out_of_range,
)
from mtpbuild.builder.formats.fp8 import FP8
from mtpbuild.builder.formats.integers import (
    INT4,
    INT8,
    SHIFTED,
    Integers,
    count_coarse_blocks,
)
from mtpbuild.builder.formats.nvfp4 import MAGNITUDES, NVFP4, pack, unpack
from mtpbuild.builder.weights.checkpoint import Loss
from mtpbuild.runtime.errors import CheckpointError

E4M3 = torch.float8_e4m3fn


def encode(format: Any, weight: Tensor) -> dict[str, Tensor]:
    return format.encode(weight, weight.abs().max())


def bytes_of(*values: int) -> Tensor:
    return torch.tensor([values], dtype=torch.uint8)


def test_nibbles() -> None:
    """In ModelOpt's NVFP4 0x72 -> (1.0, 6.0); the low nibble comes first."""
    assert unpack(bytes_of(0x72, 0x10)).tolist() == [[1.0, 6.0, 0.0, 0.5]]
    assert unpack(bytes_of(0xF9)).tolist() == [[-0.5, -6.0]]
    every = bytes_of(*range(256))
    assert torch.equal(pack(unpack(every)), every)  # -0.0 keeps its code too


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (0.76, 1), (99, 6)],
)
def test_rounding_to_e2m1(value: float, rounded: float) -> None:
    """A value goes to the nearest code, a tie to the even one; beyond 6 it saturates."""
    assert unpack(pack(torch.tensor([[value, -value]]))).tolist() == [[rounded, -rounded]]


def test_rounding_takes_the_nearest() -> None:
    values = torch.linspace(-7, 7, 2002)[None]
    steps = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
    nearest = (values[..., None] - steps).abs().amin(-1)
    assert torch.equal((values - unpack(pack(values))).abs(), nearest)


def test_nvfp4_in_two_levels() -> None:
    parts = {
        "": torch.cat([bytes_of(*[0x72] * 8), bytes_of(*[0xA9] * 8)], dim=1),
        "_scale": torch.tensor([[1.5, 448.0]]).to(E4M3),
        "_scale_2": torch.tensor(0.25),
    }
    decoded = NVFP4.decode(parts)
    assert decoded.tolist() == [[0.375, 2.25] * 8 + [-0.5 * 112, -1.0 * 112] * 8]


def test_nvfp4_scales() -> None:
    """The largest value's block has scale 448 and code 6; scale_2 is amax / (6 * 448)."""
    weight = torch.zeros(2, 32)
    weight[0, 3], weight[1, 16] = -13.44, 0.03
    parts = encode(NVFP4, weight)
    assert parts["_scale_2"].shape == ()
    assert parts["_scale_2"].item() == pytest.approx(13.44 / 2688)
    assert parts["_scale"].float().tolist() == [[448.0, 1.0], [1.0, 1.0]]
    assert parts[""][0, :3].tolist() == [0, 0xF0, 0]
    assert parts[""][1, 8].item() == 7


def test_fp8_ragged_blocks() -> None:
    """[200, 300] has blocks of 128 or 72 rows and 128 or 44 columns."""
    scales = torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.25, 0.125]])
    decoded = FP8.decode({"": torch.full((200, 300), 1.5).to(E4M3), "_scale_inv": scales})
    for row, column in [(0, 0), (127, 127), (127, 128), (128, 0), (199, 255), (199, 256), (0, 299)]:
        assert decoded[row, column].item() == 1.5 * scales[row // 128, column // 128].item()


def test_fp8_scale_is_a_multiplier() -> None:
    """e4m3 0x7E is 448, 0x01 is 2 ** -9; despite its name the scale multiplies."""
    values = bytes_of(0x7E, 0x01, 0x38, 0xB8).view(E4M3)
    decoded = FP8.decode({"": values, "_scale_inv": torch.tensor([[0.01]])})
    wanted = torch.tensor([[448.0, 2.0**-9, 1.0, -1.0]]) * torch.tensor(0.01)
    assert torch.equal(decoded, wanted)
    weight = torch.tensor([[-8.96, 0.01, 4.48]])
    parts = encode(FP8, weight)
    assert parts["_scale_inv"].item() == pytest.approx(0.02)
    assert parts[""].float().tolist() == [[-448.0, 0.5, 224.0]]


def test_int4_bytes() -> None:
    """Low nibble first, zero at 8; the extreme of a block is -8 steps; scales are fp16."""
    weight = torch.zeros(1, 64)
    weight[0, :4] = torch.tensor([-4.0, 0.5, 1.0, 3.5])
    weight[0, 32], weight[0, 63] = 1.6, -1.4
    parts = encode(INT4, weight)
    assert parts["_scale"].dtype == torch.float16
    assert parts["_scale"].tolist() == [[0.5, pytest.approx(-0.2, rel=2.0**-11)]]
    assert parts[""].shape == (1, 2, 16)
    assert parts[""][0, 0, :3].tolist() == [0x90, 0xFA, 0x88]
    assert (parts[""][0, 1, 0].item(), parts[""][0, 1, 15].item()) == (0x80, 0xF8)
    assert torch.allclose(INT4.decode(parts), weight, rtol=2.0**-11)
    assert sum(part.nbytes for part in parts.values()) * 8 / weight.numel() == 4.5


def test_int8_bytes() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([-2.56, 0.02, 2.0])
    parts = encode(INT8, weight)
    assert parts["_scale"].tolist() == [[pytest.approx(0.02, rel=2.0**-11)]]
    assert parts[""][0, 0, :4].tolist() == [0, 129, 228, 128]


def test_scales_that_are_subnormal() -> None:
    """They are rounded away from zero, so that no value is cut off; all others to the nearest."""
    weight, parts, scales, blocks = weight_of_small_blocks(INT8)
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0]
    exact = extreme / -INT8.zero
    small = exact.abs() < 2.0**-14
    assert 0.2 < small.double().mean() < 0.8
    assert torch.equal(scales[~small], exact[~small].half().double())
    away = exact.abs().mul(2.0**24).ceil().mul(2.0**-24).copysign(exact)
    assert torch.equal(scales[small], away[small])
    # The extreme's opposite is a step off; none is cut off by more.
    assert (errors(INT8, parts, weight)[small] <= 1.0001 * scales[small].abs()).all()


def test_fitted_scales_that_are_subnormal() -> None:
    """int4's are those of least squared error, also rounded away from zero."""
    weight, parts, scales, blocks = weight_of_small_blocks(INT4)
    exact = int4_scales(blocks)
    sure = (exact.abs() / 2.0**-14 - 1).abs() > 1e-3
    small = (exact.abs() < 2.0**-14) & sure
    assert 0.2 < small.double().mean() < 0.8
    torch.testing.assert_close(scales[sure], exact[sure], rtol=2.0**-10, atol=2.0**-23)
    assert (scales[small].abs() >= exact[small].abs() * (1 - 1e-6)).all()
    # The extreme's opposite may be two steps off, as int4 cuts it; none is cut off by more.
    assert (errors(INT4, parts, weight)[small] <= 2 * scales[small].abs()).all()


@pytest.mark.parametrize("format", [INT4, INT8])
def test_coarse_blocks_are_counted(format: Integers) -> None:
    _, parts, scales, _ = weight_of_small_blocks(format)
    assert count_coarse_blocks(parts["_scale"]) == (scales.abs() < 2.0**-21).sum()
    assert count_coarse_blocks(encode(format, torch.zeros(2, 64))["_scale"]) == 0


def weight_of_small_blocks(format: Integers) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """Return a weight, its parts, its scales and its blocks, both in fp64."""
    torch.manual_seed(0)
    weight = torch.randn(200, 64) * torch.logspace(-9, 2, 200)[:, None]
    parts = encode(format, weight)
    return weight, parts, parts["_scale"].double(), weight.double().unflatten(1, (-1, 32))


def errors(format: Integers, parts: dict[str, Tensor], weight: Tensor) -> Tensor:
    """Return the largest error of each block."""
    return (format.decode(parts).double() - weight).unflatten(1, (-1, 32)).abs().amax(-1)


def int4_scales(blocks: Tensor) -> Tensor:
    """Return the scale of least squared error of each block [.., 32] in fp64, over all steps."""
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    steps = -torch.arange(6.5, 9.1, 0.25, dtype=torch.float64)
    q = (blocks / extreme)[..., None, :] * steps[:, None]
    q = q.round().clamp(-8, 7)
    products, squares = (q * blocks[..., None, :]).sum(-1), q.square().sum(-1)
    best = (products.square() / squares).argmax(-1, keepdim=True)
    return (products / squares).gather(-1, best)[..., 0]


def test_int4_has_the_scale_of_least_error() -> None:
    """Its error is below Q4_0's in every block, and 3 % from a fine search's at most."""
    torch.manual_seed(1)
    weight = torch.randn(64, 128)
    blocks = weight.unflatten(1, (-1, 32))
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))

    def errors(scales: Tensor) -> Tensor:
        rounded = (blocks / scales).round().clamp(-8, 7) * scales
        return (rounded - blocks).square().sum(-1)

    parts = encode(INT4, weight)
    found = (INT4.decode(parts) - weight).unflatten(1, (-1, 32)).square().sum(-1)
    assert (found <= 1.001 * errors(extreme / -8)).all()
    fine = [errors(extreme / step) for step in torch.linspace(-10, -6, 400).tolist()]
    assert found.sum() < 1.03 * torch.stack(fine).amin(0).sum()
    assert found.sum() < 0.92 * errors(extreme / -8).sum()


def test_int4_is_the_same_in_pieces() -> None:
    """Rows encoded alone are the rows of the whole weight, and what is exact stays exact."""
    torch.manual_seed(2)
    weight = torch.randn(300, 640)  # more blocks than are fitted together
    whole = encode(INT4, weight)
    for start, rows in ((0, 1), (7, 40), (123, 177)):
        some = encode(INT4, weight[start : start + rows])
        assert all(torch.equal(some[n], part[start : start + rows]) for n, part in whole.items())
    values = torch.randint(-7, 8, (300, 20, 32)).float()
    values[..., 3] = -8
    exact = (values * torch.randn(300, 20, 1).half()).flatten(1)
    assert torch.equal(INT4.decode(encode(INT4, exact)), exact)


@pytest.mark.parametrize(("format", "most"), [(INT4, 524_032), (INT8, 8_384_512)])
def test_weights_beyond_fp16_scales(format: Integers, most: int) -> None:
    weight = torch.zeros(2, 32)
    weight[0, 3], weight[1, 3] = most, -most
    refuse_out_of_range(format, "w", weight)
    torch.testing.assert_close(format.decode(encode(format, weight)), weight)
    weight[1, 3] = -most - 100
    with pytest.raises(CheckpointError, match=f"w holds {most + 100:,}, but {format.name} ends"):
        refuse_out_of_range(format, "w", weight)


@pytest.mark.parametrize("format", [INT4, INT8, SHIFTED[4], SHIFTED[8]])
@pytest.mark.parametrize("power", range(-12, 9))
def test_a_weight_keeps_its_accuracy_or_is_refused(format: Integers, power: int) -> None:
    """The loss is about that of a weight whose root mean square is 1, whatever its own is."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(power))
    usual = Loss().after(weight, encode(format, weight), format).relative
    weight *= 10.0**power
    try:
        refuse_out_of_range(format, "w", weight)
    except CheckpointError:
        assert power < -4 or power > 3
        return
    assert -6 < power < 7
    assert Loss().after(weight, encode(format, weight), format).relative < 1.25 * usual


def test_rows_without_weight_refuse_no_other() -> None:
    """Tokens that no text has may have rows near zero."""
    weight = torch.randn(64, 256)
    weight[40:] *= 1e-20
    refuse_out_of_range(INT4, "w", weight)
    refuse_out_of_range(INT4, "w", 0 * weight)
    with pytest.raises(CheckpointError, match="w"):
        refuse_out_of_range(INT4, "w", weight[40:])


def test_scales_without_minima_in_fp16_are_refused() -> None:
    """A weight that is joined with one that has minima gets its own: -8 times its scales."""
    scales = torch.tensor([[8000.0, 100.0]]).half()
    SHIFTED[4].rows("_scale", scales, (1, 64), 32)
    with pytest.raises(CheckpointError, match="too large for minima in fp16"):
        SHIFTED[4].rows("_scale", scales * 2, (1, 64), 32)


def plain_decode(name: str, parts: dict[str, Tensor], n: int, k: int) -> float:
    """One value of a weight, by the format's definition."""
    value = parts[""]
    if name == "fp8":
        return value[n, k].float().item() * parts["_scale_inv"][n // 128, k // 128].item()
    if name == "nvfp4":
        code = int(value[n, k // 2]) >> 4 * (k % 2) & 0xF
        sign = -1 if code & 8 else 1
        scale = parts["_scale"][n, k // 16].float().item()
        return sign * MAGNITUDES[code & 7] * scale * parts["_scale_2"].item()
    scale, block, i = parts["_scale"][n, k // 32].item(), value[n, k // 32], k % 32
    if name == "int8":
        return (block[i].item() - 128) * scale
    return ((int(block[i // 2]) >> 4 * (i % 2) & 0xF) - 8) * scale


STEP = {"fp8": 1 / 16, "nvfp4": 1 / 6, "int8": 1 / 128, "int4": 1 / 8}  # of the block's largest


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"mxfp4"}))
@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (130, 288), (256, 128)])
def test_there_and_back(name: str, shape: tuple[int, int]) -> None:
    """StoredTensor as promised, decoded by the definition, within half a step of the source."""
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-3, 1, shape[0])[:, None]
    parts = encode(FORMATS[name], weight)
    promised = FORMATS[name].parts(shape)
    sizes = {suffix: tuple(part.shape) for suffix, part in parts.items()}
    assert sizes == {suffix: part.shape for suffix, part in promised.items()}
    decoded = FORMATS[name].decode(parts)
    assert decoded.dtype == torch.float32
    for n, k in torch.cartesian_prod(torch.arange(shape[0]), torch.arange(shape[1]))[::37].tolist():
        assert decoded[n, k].item() == pytest.approx(plain_decode(name, parts, n, k), rel=1e-7)
    width = {"fp8": 128, "nvfp4": 16}.get(name, 32)
    for n, k in [(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 2)]:
        rows = slice(n // 128 * 128, n // 128 * 128 + 128) if name == "fp8" else slice(n, n + 1)
        block = weight[rows, k // width * width : (k // width + 1) * width]
        error = (weight[n, k] - decoded[n, k]).abs().item()
        assert error <= STEP[name] * block.abs().max().item() * 1.07


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"mxfp4"}))
@pytest.mark.parametrize("scale", [0, 1])
def test_quantising_twice_changes_nothing(name: str, scale: int) -> None:
    """Zeros stay zeros."""
    torch.manual_seed(1)
    once = FORMATS[name].decode(encode(FORMATS[name], scale * torch.randn(20, 160)))
    twice = FORMATS[name].decode(encode(FORMATS[name], once))
    assert torch.allclose(once, twice, rtol=1e-6, atol=0)
    assert once.any() == bool(scale)


def test_a_small_block_beside_a_large_one() -> None:
    """The scale of a block never becomes 0, so nothing is divided by it."""
    weight = torch.cat([torch.full((1, 16), 1e-9), torch.full((1, 16), 1.0)], dim=1)
    decoded = NVFP4.decode(encode(NVFP4, weight))
    assert decoded[0, :16].abs().max() == 0
    assert math.isclose(decoded[0, 16].item(), 1.0, rel_tol=1e-6)


ODD: list[Any] = [
    None, 3, "x", [], [1], {}, {"a": 1}, {"a": {}}, -1, True, {"a": {"weights": 3, "format": 5}},
]  # fmt: skip
KEYS = (
    "format config_groups ignore transform_config bits group_size sym checkpoint_format dynamic "
    "desc_act version packing_format extra_config quant_algo quantized_layers weight_block_size"
)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_settings_of_any_type_are_read_or_refused(method: str, tmp_path: Path) -> None:
    """What users edit or other programs write ends in a message, never in a traceback."""
    entries = {
        "x.weight": Entry("I32", (16, 8)),
        "x.weight_scale": Entry("BF16", (16, 1)),
        "y.weight": Entry("I32", (16, 8)),
        "y.weight_qzeros": Entry("I32", (1, 1)),
        "y.weight_scales": Entry("F16", (1, 8)),
    }
    read = refused = 0
    for key in KEYS.split():
        for value in ODD:
            settings = {"quant_method": method, "bits": 4, key: value}
            (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
            try:
                refuse_quantised(tmp_path, tmp_path)
            except CheckpointError:
                refused += 1
                continue
            name_stored_format(settings, "x.weight")
            find_stored_format("x.weight", entries, settings)
            find_stored_format("y.weight", entries, settings)
            read += 1
    assert read + refused == len(KEYS.split()) * len(ODD)
    assert read or method in ("modelopt", "fp8"), "these need a key that is right"
