"""Weights of GPTQ and auto-round against formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtpbuild.builder.formats import METHODS, Format, find_stored_format, name_own
from mtpbuild.builder.formats.format import make_entry
from mtpbuild.builder.formats.integers import INT4, INT8, MOVED
from mtpbuild.runtime.errors import CheckpointError
from tests.support.other_formats import pack_words


def gptq(bits: int, zero: Tensor | int, order: Tensor, **said: Any) -> tuple[Any, ...]:
    """Return a format, its parts, and codes and scales of 128 inputs in groups of 32."""
    codes, scales = torch.randint(0, 2**bits, (128, 32)), torch.rand(4, 32).half()
    zeros = torch.as_tensor(zero).expand(4, 32)
    tensors = {"qweight": pack_words(codes, bits, 0), "qzeros": pack_words(zeros, bits, 1)}
    tensors |= {"scales": scales, "g_idx": order.int()}
    own = {name_own(f"x.{ending}"): tensor for ending, tensor in tensors.items()}
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32} | said
    format = find_stored_format("x.weight", {n: make_entry(t) for n, t in own.items()}, settings)
    assert format is not None
    return format, {s: own[f"x.weight{s}"] for s in format.suffixes}, codes, scales


AUTO_ROUND: dict[str, Any] = {"quant_method": "auto-round"}
PACKINGS = {"auto_round": 0, "auto_round:auto_gptq": 1, "auto": 1, None: 1}
VERSIONS: list[tuple[dict[str, Any], int]] = [  # what zero points are stored less by
    *(({"checkpoint_format": version}, less) for version, less in (("gptq", 1), ("gptq_v2", 0))),
    *((AUTO_ROUND | {"packing_format": name}, less) for name, less in PACKINGS.items()),
    *((settings, 1) for settings in ({}, AUTO_ROUND)),
]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("output", "less"), VERSIONS)
def test_gptq(bits: int, output: dict[str, Any], less: int) -> None:
    order = torch.randint(0, 4, (128,))
    zeros = torch.randint(0, 2**bits - 1, (4, 32))
    assert METHODS[output.get("quant_method", "gptq")]({"bits": bits, **output}) is None
    format, parts, codes, scales = gptq(bits, zeros, order, desc_act=True, **output)
    wanted = (codes - zeros[order] - less).float() * scales.float()[order]
    assert format.engine_format is format
    assert format.fault(parts) is None
    assert torch.equal(format.decode(parts), wanted.T)
    # In the order of their groups, integers are kept with their zero points.
    format, parts, *_ = gptq(bits, zeros, torch.arange(128) // 32, **output)
    assert format.engine_format is MOVED[max(bits, 4)]
    held = format.engine_format.decode(format.to_engine_format("x", parts))
    assert torch.equal(held.view(32, 128), format.decode(parts))
    sizes = {s: (entry.dtype, entry.shape) for s, entry in format.parts((32, 128)).items()}
    assert sizes == {s: (make_entry(p).dtype, tuple(p.shape)) for s, p in parts.items()}


@pytest.mark.parametrize("kept", [INT4, INT8])
def test_symmetric_integers_stay(kept: Format) -> None:
    order = torch.arange(128) // 32
    middle = 2 ** (kept.bits - 1) - 1
    format, parts, *_ = gptq(kept.bits, middle, order, sym=True)
    assert format.engine_format is kept
    assert format.fault(parts) is None
    held = kept.decode(format.to_engine_format("x", parts))
    assert torch.equal(held.view(32, 128), format.decode(parts))
    with pytest.raises(CheckpointError, match="x_g_idx has inputs in another order"):
        format.to_engine_format("x", parts | {"_g_idx": parts["_g_idx"].flip(0)})
    wrong = pack_words(torch.full((4, 32), middle + 1), kept.bits, 1)
    assert "has zero points other than" in str(format.fault(parts | {"_qzeros": wrong}))


def test_zero_points_that_wrap() -> None:
    format, parts, *_ = gptq(4, 15, torch.arange(128) // 32)
    assert "version 1 of GPTQ can't store" in str(format.fault(parts))
