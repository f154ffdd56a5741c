"""Adds weights to a TensorRT network, each once however often it is used.

What TensorRT's own layers read is a constant: it may pack it as it likes. What our kernels read is
an input, whose address is given when the engine runs; so engines share it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtpbuild.runtime.contract.programs import WEIGHT


class Constants:
    """The weights of one network. It does not copy them, so they live as long as it does.

    shared: names by address, of weights that our kernels are given as inputs of the network.
    """

    def __init__(self, network: Any, shared: Mapping[int, str] | None = None) -> None:
        self.network, self._shared = network, shared or {}
        self.given: dict[str, Any] = {}  # inputs by the weight's name
        self.held: dict[str, Tensor] = {}  # by the name of their layer, which does not tell them
        self._tensors: dict[tuple[Any, ...], Any] = {}  # by address, shape and type
        self._weights: dict[tuple[Any, ...], Any] = {}

    def constant(self, tensor: Tensor, dtype: Any, name: str) -> Any:
        """Add a contiguous tensor to the network, as TensorRT's `dtype`.

        A uint8 tensor holds a value of `dtype` per byte, or two of its last dimension if FP4.
        """
        import tensorrt as trt

        key = tensor.data_ptr(), tensor.shape, dtype
        if key not in self._tensors:
            shape, values = [*tensor.shape], 2 if dtype == trt.fp4 else 1
            if shape:
                shape[-1] *= values
            weights = trt.Weights(dtype, tensor.data_ptr(), values * tensor.numel())
            layer = self.network.add_constant(shape, weights)
            layer.name = name
            self.held[name] = tensor
            self._tensors[key] = layer.get_output(0)
        return self._tensors[key]

    def operand(self, tensor: Tensor, dtype: Any, name: str) -> Any:
        """Give a kernel of ours a weight: an input if engines share it, else a constant.

        Bytes, of whatever, are INT8 in an input: of FP8 there are constants, and no inputs.
        """
        import tensorrt as trt

        own = self._shared.get(tensor.data_ptr())
        if own is None:
            return self.constant(tensor, dtype, name)
        if own not in self.given:
            kind = trt.int8 if tensor.element_size() == 1 else dtype
            given = self.network.add_input(WEIGHT.format(own), kind, tuple(tensor.shape))
            self.given[own] = given
        return self.given[own]

    def weight(
        self, dtype: Any, values: Tensor, scales: Tensor, scales_2: Tensor | None, name: str
    ) -> Any:
        """Dequantise a weight in the network, from what `matmul_scaled` takes to [K, N] of `dtype`.

        nvfp4 is dequantised in two levels, as in the networks that ModelOpt exports: TensorRT sees
        the format in front of the product, and may choose kernels of its own for it. For a result
        in bfloat16 scales are rounded to it too.
        """
        import tensorrt as trt

        key = values.data_ptr(), dtype
        if key not in self._weights:
            if scales_2 is None:
                held = self.constant(values, trt.fp8, f"{name}_values")
                scale = self.constant(scales, trt.float32, f"{name}_scales")
            else:
                held = self.constant(by_outputs(values), trt.fp4, f"{name}_values")
                inner = self.constant(scales, trt.fp8, f"{name}_scales")
                outer = self.constant(one(scales_2), trt.float32, f"{name}_scales_2")
                scale = self.network.add_dequantize(inner, outer, trt.float32).get_output(0)
            if dtype != trt.float32:  # a scale has the result's type
                scale = self.network.add_cast(scale, dtype).get_output(0)
            self._weights[key] = self.network.add_dequantize(held, scale, dtype).get_output(0)
        return self._weights[key]


def by_outputs(values: Tensor) -> Tensor:
    """Repack nvfp4 from two inputs per byte [K / 2, N] to two outputs [K, N / 2], for TensorRT."""
    inputs = torch.stack([values & 0xF, values >> 4], dim=1).flatten(0, 1)
    return inputs[:, 0::2] | inputs[:, 1::2] << 4


def one(scales: Tensor) -> Tensor:
    """Give one number if all are the same, as where weights were quantised together."""
    first = scales.flatten()[0]
    return first.clone() if bool((scales == first).all()) else scales  # another address
