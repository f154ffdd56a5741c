"""Quantised weights as constants of a TensorRT network: their numbers are the op's.

Two levels of scales round twice, so nvfp4 may differ in the last digit. The network here computes
what TensorRT documents of its layers; `make test-tensorrt` shows that TensorRT-RTX takes them.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpbuild.plugins.constants import Constants
from mtpbuild.plugins.matmul_scaled.op import dequantise
from mtpbuild.plugins.matmul_scaled.tensorrt import matmul_scaled_tensorrt
from tests.support.fake_tensorrt import (
    DataType,
    FakeTensorRt,
    ITensor,
    LayerType,
    Network,
)
from tests.support.kernels import random_scaled
from tests.support.stand_ins import importing


def value(network: Network, tensor: ITensor) -> Tensor:
    """Return what the network computes for a tensor."""
    network.outputs.clear()
    network.mark_output(tensor)
    return network.run({})[0]


def list_constants(network: Network) -> list[tuple[DataType, tuple[int, ...]]]:
    constants = [x for x in network.layers if x.type is LayerType.CONSTANT]
    return [(x.outputs[0].dtype, x.outputs[0].shape) for x in constants]


@pytest.fixture(autouse=True)
def trt() -> Iterator[None]:
    with importing({"tensorrt": FakeTensorRt()}):
        yield


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(32, 6), (256, 20)])
@pytest.mark.parametrize("by_input", [False, True])
def test_the_numbers(form: str, shape: tuple[int, int], by_input: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = random_scaled(generator, form, *shape, by_input=by_input)
    network = Network()
    constants = Constants(network)
    found = constants.weight(DataType.FLOAT, *weight, "a")
    numbers = value(network, found)
    torch.testing.assert_close(numbers, dequantise(*weight), rtol=2.0**-22, atol=0.0)
    assert form == "nvfp4" or torch.equal(numbers, dequantise(*weight))
    assert constants.weight(DataType.FLOAT, *weight, "b") is found  # once, however often it is used
    kind = {"fp8": DataType.FP8, "nvfp4": DataType.FP4}[form]
    assert list_constants(network).count((kind, shape)) == 1
    assert set(constants.by_layer) == {
        f"a_{part}" for part in ("values", "scales", "scales_2")[: 2 + (form == "nvfp4")]
    }


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_in_bfloat16(form: str) -> None:
    """A scale has the result's type, as TensorRT wants it: it is rounded, and so is the weight."""
    weight = random_scaled(torch.Generator().manual_seed(4), form, 256, 20)
    network = Network()
    constants = Constants(network)  # holds the weights' memory
    found = value(network, constants.weight(DataType.BF16, *weight, "a"))
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
    found = constants.weight(DataType.FLOAT, values, scales, second, "a")
    numbers = value(network, found)
    torch.testing.assert_close(numbers, dequantise(values, scales, second), rtol=2.0**-22, atol=0.0)
    assert (DataType.FLOAT, ()) in list_constants(network)
    assert constants.by_layer["a_scales_2"].data_ptr() != second.data_ptr()


def test_a_product() -> None:
    def matrix_multiply(ctx: Any, target: Any, source: Any, name: str, x: Any, y: Any) -> Any:
        return ctx.net.add_matrix_multiply(x, y).get_output(0)

    impl: Any = SimpleNamespace(matmul=SimpleNamespace(matrix_multiply=matrix_multiply))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 32, generator=generator)
    for form in ("fp8", "nvfp4"):
        network = Network()
        ctx = SimpleNamespace(net=network, constants=Constants(network), few_tokens=False)
        operand = network.add_constant([3, 32], x.numpy()).get_output(0)
        weight = random_scaled(generator, form, 32, 6)
        given = weight[:2] if form == "fp8" else weight  # a default argument is left out
        with importing({"torch_tensorrt.dynamo.conversion.impl": impl}):
            found = matmul_scaled_tensorrt(ctx, None, (operand, *given), {}, form)
        torch.testing.assert_close(value(network, found), x @ dequantise(*weight))
