"""The weights of a TensorRT network, each added once however often it is used.

Weights of TensorRT's own layers are constants, which it may repack. Weights of our kernels are
inputs, whose addresses are set when the engine runs, so that engines can share them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtpbuild.runtime.contract.programs import WEIGHT


class Constants:
    """The weights of one network; they are not copied, so they must live as long as the network.

    shared: address -> name of the weights that our kernels get as inputs of the network.
    """

    def __init__(self, network: Any, shared: Mapping[int, str] | None = None) -> None:
        self.network = network
        self._shared = shared or {}
        self.given: dict[str, Any] = {}  # inputs by the weight's name
        self.by_layer: dict[str, Tensor] = {}  # constants by layer name; a layer can't return them
        self._tensors: dict[tuple[Any, ...], Any] = {}  # by address, shape and type
        self._weights: dict[tuple[Any, ...], Any] = {}

    def constant(self, tensor: Tensor, dtype: Any, name: str) -> Any:
        """Add a contiguous tensor to the network as a constant of TensorRT's `dtype`.

        A byte of a uint8 tensor holds one value of `dtype`; with FP4, two of the last dimension.
        """
        import tensorrt as trt

        key = tensor.data_ptr(), tensor.shape, dtype
        if key not in self._tensors:
            shape = [*tensor.shape]
            values = 2 if dtype == trt.fp4 else 1
            if shape:
                shape[-1] *= values
            weights = trt.Weights(dtype, tensor.data_ptr(), values * tensor.numel())
            layer = self.network.add_constant(shape, weights)
            layer.name = name
            self.by_layer[name] = tensor
            self._tensors[key] = layer.get_output(0)
        return self._tensors[key]

    def operand(self, tensor: Tensor, dtype: Any, name: str) -> Any:
        """Add a weight for one of our kernels: an input if engines share it, else a constant.

        An input of one-byte values is INT8, since TensorRT has FP8 constants but no FP8 inputs.
        """
        import tensorrt as trt

        weight = self._shared.get(tensor.data_ptr())
        if weight is None:
            return self.constant(tensor, dtype, name)
        if weight not in self.given:
            kind = trt.int8 if tensor.element_size() == 1 else dtype
            added = self.network.add_input(WEIGHT.format(weight), kind, tuple(tensor.shape))
            self.given[weight] = added
        return self.given[weight]

    def weight(
        self, dtype: Any, values: Tensor, scales: Tensor, scales_2: Tensor | None, name: str
    ) -> Any:
        """Dequantise a weight in `matmul_scaled`'s layout to [K, N] of `dtype`, in the network.

        nvfp4 is dequantised in two levels, as in the networks that ModelOpt exports, so that
        TensorRT recognises the format and can choose its own kernels. For a bfloat16 result the
        scales are rounded to bfloat16, too.
        """
        import tensorrt as trt

        key = values.data_ptr(), dtype
        if key not in self._weights:
            if scales_2 is None:
                quantised = self.constant(values, trt.fp8, f"{name}_values")
                scale = self.constant(scales, trt.float32, f"{name}_scales")
            else:
                quantised = self.constant(by_outputs(values), trt.fp4, f"{name}_values")
                inner = self.constant(scales, trt.fp8, f"{name}_scales")
                outer = self.constant(merge_equal_scales(scales_2), trt.float32, f"{name}_scales_2")
                scale = self.network.add_dequantize(inner, outer, trt.float32).get_output(0)
            if dtype != trt.float32:  # scales must have the result's type
                scale = self.network.add_cast(scale, dtype).get_output(0)
            self._weights[key] = self.network.add_dequantize(quantised, scale, dtype).get_output(0)
        return self._weights[key]


def by_outputs(values: Tensor) -> Tensor:
    """Repack nvfp4 from two inputs per byte [K / 2, N] to two outputs [K, N / 2], for TensorRT."""
    inputs = torch.stack([values & 0xF, values >> 4], dim=1).flatten(0, 1)
    return inputs[:, 0::2] | inputs[:, 1::2] << 4


def merge_equal_scales(scales: Tensor) -> Tensor:
    """Return one number if all scales are equal, as for weights that were quantised together."""
    first = scales.flatten()[0]
    return first.clone() if bool((scales == first).all()) else scales  # needs its own address
