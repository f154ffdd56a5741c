"""The inline assembly that expands fp8 and nvfp4 codes, executed as PTX.

Triton's interpreter runs the kernels without it, so every code goes through the text itself here.
"""

import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from mtpbuild.plugins.matmul_scaled.op import e2m1, e4m3
from tests.support.ptx_machine import run_assembly

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
codes = import_module("mtpbuild.plugins.codes")


def executed(text: str, outputs: int, *inputs: Tensor) -> list[Tensor]:
    """Run assembly on registers of 32 bits, as int64 tensors of one shape."""
    words = (value.numpy().astype(np.uint32) for value in inputs)
    held = run_assembly(text, {f"${outputs + i}": value for i, value in enumerate(words)})
    return [torch.from_numpy(held[f"${i}"].astype(np.int64)) for i in range(outputs)]


def halves(x: Tensor, dtype: torch.dtype) -> Tensor:
    both = torch.stack([x & 0xFFFF, x >> 16], dim=-1)
    return both.to(torch.uint16).view(dtype)


FINITE = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F])


def words_of(codes: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Put each code in each byte of two words; also return byte j of both, low word first."""
    columns = [codes.roll(7 * j) for j in range(8)]
    first, second = (
        sum((column << 8 * j for j, column in enumerate(columns[i : i + 4])), torch.tensor(0))
        for i in (0, 4)
    )
    return first, second, [torch.stack(columns[j::4], dim=-1).to(torch.uint8) for j in range(4)]


def test_prmt() -> None:
    a, b = torch.tensor([0x8476_0291]), torch.tensor([0x0000_0080])
    for selector, wanted in ((0xC480, 0xFF80_FF91), (0x3210, 0x8476_0291)):
        (got,) = executed(f"{{ prmt.b32 $0, $1, $2, {selector}; }}", 1, a, b)
        assert got.item() == wanted


@pytest.mark.parametrize("how", ["MOVED", "CONVERTED"])
def test_every_e4m3_code(how: str) -> None:
    first, second, bytes_ = words_of(FINITE)
    made = executed(getattr(codes, f"{how}_E4M3").value, 4, first, second)
    for result, each in zip(made, bytes_, strict=True):
        assert torch.equal(halves(result, torch.bfloat16).double(), e4m3(each).double())


@pytest.mark.parametrize("how", ["MOVED", "CONVERTED"])
def test_every_e2m1_code_with_every_scale(how: str) -> None:
    """The product is exact: 1 / 128 of it, which the global scales take back."""
    values, scales = (x.flatten() for x in torch.meshgrid(torch.arange(256), FINITE, indexing="ij"))
    word, _, bytes_ = words_of(values)
    scale_word, _, scale_bytes = words_of(scales)
    by = executed(getattr(codes, f"{how}_SCALES").value, 4, scale_word)
    made = executed(getattr(codes, f"{how}_E2M1").value, 4, word, *by)
    for j in range(4):
        scale = e4m3(scale_bytes[j][:, 0]).double()
        for i, got in enumerate(halves(made[j], torch.bfloat16).double().unbind(-1)):
            value = e2m1(bytes_[j][:, 0] >> 4 * i & 0xF).double()
            assert torch.equal(got * codes.SMALLER.value, value * scale)


@pytest.mark.parametrize(
    ("own", "chosen", "used"),
    [("13.1", None, "/there"), ("13.2", None, None), ("12.9", "/mine", "/mine")],
)
def test_a_newer_assembler_is_used_where_it_is_needed(
    own: str, chosen: str | None, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's own of 3.6 and 3.7 can't convert codes for sm_100; what the user says stays."""
    monkeypatch.delenv(codes.PTXAS, raising=False)
    if chosen:
        monkeypatch.setenv(codes.PTXAS, chosen)
    tool = SimpleNamespace(version=own)
    nvidia = SimpleNamespace(ptxas_blackwell=tool)
    monkeypatch.setattr(codes, "knobs", SimpleNamespace(nvidia=nvidia))
    codes.use_assembler(None)
    assert os.environ.get(codes.PTXAS) == chosen
    codes.use_assembler(Path("/there"))
    assert os.environ.get(codes.PTXAS) == used
    monkeypatch.delenv(codes.PTXAS, raising=False)


@pytest.mark.parametrize(
    ("architecture", "ptxas", "chosen"),
    [(90, "13.4", 80), (100, "13.1", 80), (100, "13.2", 100), (120, "14.0", 100)],
)
def test_the_instructions_of_a_gpu(architecture: int, ptxas: str, chosen: int) -> None:
    assert codes.assembly_for(architecture, ptxas) == chosen
