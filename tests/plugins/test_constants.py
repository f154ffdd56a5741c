"""Quantised weights as constants of a TensorRT network: their numbers are the op's.

Two levels of scales round twice, so nvfp4 may differ in the last digit. The network here computes
what TensorRT documents of its layers; `make test-tensorrt` shows that TensorRT-RTX takes them.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpbuild.builder.formats.nvfp4 import unpack
from mtpbuild.plugins.constants import Constants
from mtpbuild.plugins.matmul_scaled.op import dequantise, e4m3
from mtpbuild.plugins.matmul_scaled.tensorrt import matmul_scaled_tensorrt
from tests.support.kernels import random_scaled
from tests.support.stand_ins import importing

BYTES = {"FP4": 0.5, "FP8": 1, "FLOAT": 4}


@dataclass
class Weights:
    """Values somewhere in memory, FP4 packed with the low nibble first."""

    dtype: str
    address: int
    count: int

    def values(self, shape: tuple[int, ...]) -> Tensor:
        assert self.count == prod(shape)
        raw = ctypes.string_at(self.address, int(self.count * BYTES[self.dtype]))
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if self.dtype == "FLOAT":
            return data.view(torch.float32).reshape(shape)
        if self.dtype == "FP8":
            return e4m3(data).reshape(shape)
        return unpack(data[None]).reshape(shape)


class Network:
    def __init__(self) -> None:
        self.made: list[str] = []

    def add_constant(self, shape: list[int], weights: Weights) -> Any:
        self.made.append(f"{weights.dtype} {shape}")
        return self._layer(weights.values(tuple(shape)))

    def add_dequantize(self, values: Tensor, scales: Tensor, dtype: str) -> Any:
        """Multiply by a scale per block; at most one dimension has blocks of several values."""
        self.made.append("dequantised")
        if scales.dim():
            blocks = [n / m for n, m in zip(values.shape, scales.shape, strict=True)]
            assert sum(block > 1 for block in blocks) <= 1
            for axis, block in enumerate(blocks):
                assert block.is_integer()
                scales = scales.repeat_interleave(int(block), dim=axis)
        return self._layer(values.to(scales.dtype) * scales)

    def add_cast(self, values: Tensor, dtype: str) -> Any:
        return self._layer(values.bfloat16() if dtype == "BF16" else values)

    def _layer(self, result: Tensor) -> Any:
        return SimpleNamespace(get_output=lambda i: result)


@pytest.fixture(autouse=True)
def trt() -> Iterator[None]:
    module: Any = SimpleNamespace(fp4="FP4", fp8="FP8", float32="FLOAT", Weights=Weights)
    with importing({"tensorrt": module}):
        yield


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(32, 6), (256, 20)])
@pytest.mark.parametrize("by_input", [False, True])
def test_the_numbers(form: str, shape: tuple[int, int], by_input: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = random_scaled(generator, form, *shape, by_input=by_input)
    network = Network()
    constants = Constants(network)
    found = constants.weight("FLOAT", *weight, "a")
    torch.testing.assert_close(found, dequantise(*weight), rtol=2.0**-22, atol=0.0)
    assert form == "nvfp4" or torch.equal(found, dequantise(*weight))
    assert constants.weight("FLOAT", *weight, "b") is found  # once, however often it is used
    kind = {"fp8": "FP8", "nvfp4": "FP4"}[form]
    assert network.made.count(f"{kind} {[*shape]}") == 1
    assert set(constants.by_layer) == {
        f"a_{part}" for part in ("values", "scales", "scales_2")[: 2 + (form == "nvfp4")]
    }


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_in_bfloat16(form: str) -> None:
    """A scale has the result's type, as TensorRT wants it: it is rounded, and so is the weight."""
    weight = random_scaled(torch.Generator().manual_seed(4), form, 256, 20)
    network = Network()
    found = Constants(network).weight("BF16", *weight, "a")
    assert found.dtype == torch.bfloat16
    exact = dequantise(*weight)
    torch.testing.assert_close(found.float(), exact, rtol=2.0**-7, atol=0.0)
    assert not torch.equal(found.float(), exact)


def test_one_number_for_all() -> None:
    """ModelOpt's networks have one scale, at its own address: TensorRT names weights by it."""
    generator = torch.Generator().manual_seed(2)
    values, scales, _ = random_scaled(generator, "nvfp4", 32, 6)
    second = torch.full((1, 6), 0.37)
    network = Network()
    constants = Constants(network)
    found = constants.weight("FLOAT", values, scales, second, "a")
    torch.testing.assert_close(found, dequantise(values, scales, second), rtol=2.0**-22, atol=0.0)
    assert "FLOAT []" in network.made
    assert constants.by_layer["a_scales_2"].data_ptr() != second.data_ptr()


def test_a_product() -> None:
    def matrix_multiply(
        ctx: Any, target: Any, source: Any, name: str, x: Tensor, y: Tensor
    ) -> Tensor:
        return x @ y

    impl: Any = SimpleNamespace(matmul=SimpleNamespace(matrix_multiply=matrix_multiply))
    generator = torch.Generator().manual_seed(3)
    x, ctx = (
        torch.randn(3, 32, generator=generator),
        SimpleNamespace(constants=Constants(Network()), few_tokens=False),
    )
    for form in ("fp8", "nvfp4"):
        weight = random_scaled(generator, form, 32, 6)
        given = weight[:2] if form == "fp8" else weight  # a default argument is left out
        with importing({"torch_tensorrt.dynamo.conversion.impl": impl}):
            found = matmul_scaled_tensorrt(ctx, None, (x, *given), {}, form)
        torch.testing.assert_close(found, x @ dequantise(*weight))
