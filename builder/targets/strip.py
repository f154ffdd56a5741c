"""Engines without their weights: each has a name, by which loading puts it back."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def strip(
    trt: ModuleType,
    network: Any,
    config: Any,
    values: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Leave the weights out of what is compiled; returns those that are none of `values`, by name.

    values: what the weights file holds, by the names there, in memory that the network shares.
    constants: the quantised ones, by the names of their layers.
    """
    config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)  # so TensorRT may go by their values
    known = {value.data_ptr(): name for name, value in values.items()}
    others: dict[str, Tensor] = {}
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type != trt.LayerType.CONSTANT:
            continue
        layer.__class__ = trt.IConstantLayer  # what it is; the network gives it as a plain layer
        weights = layer.weights
        if isinstance(weights, trt.Weights):  # NumPy has no such type, and they no address
            held = constants[layer.name]
            weights = trt.Weights(weights.dtype, held.data_ptr(), weights.size)
        else:
            held = torch.from_numpy(weights)
        address = held.data_ptr()
        if address not in known:
            known[address] = f"constant.{len(others)}"
            others[known[address]] = held.clone()
        assert network.set_weights_name(weights, known[address])
    return others
