"""Runs NVIDIA's `tensorrt.plugin` over TensorRT-RTX's library, whose networks take no plugins.

The package is plain Python from TensorRT's own bindings, whose library is not loaded. This module
calls it for an AOT plugin as TensorRT does, in the same order, and stands in for missing bindings.
In place of the plugin a network gets a constant of the right type and shape for each output.
"""

import json
import sys
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from mtpbuild.plugins.launch import AOT_SHARED


class QuickPluginCreationRequest(Enum):
    STRICT_AOT = 4


class Bare:
    """A stand-in for a class that only holds attributes."""


@dataclass(frozen=True)
class Number:
    """A stand-in for IDimensionExpr: our sizes are constants."""

    value: int

    def is_constant(self) -> bool:
        return True

    def get_constant_value(self) -> int:
        return self.value


class Numbers:
    """A stand-in for IExprBuilder."""

    constant = Number


def install(trt: Any) -> list[dict[str, Any]]:
    """Install `tensorrt.plugin`; return a list, to which it appends each network's plugins.

    Call it before the package is first imported.
    """
    trt.QuickPluginCreationRequest = QuickPluginCreationRequest
    trt.IPluginV3QuickAOTBuild = trt.ISymExpr = Bare
    trt.IDimensionExpr, trt.DimsExprs = Number, lambda length: [None] * length
    spec = find_spec("tensorrt_bindings")
    assert spec is not None, "tools/tensorrt_rtx_env.sh installs it"
    package = ModuleType("tensorrt_bindings")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["tensorrt_bindings"] = package
    sys.modules["tensorrt.plugin"] = trt.plugin = import_module("tensorrt_bindings.plugin")

    found: list[dict[str, Any]] = []
    held = []  # a network does not copy its constants

    def add_plugin(network: Any, make: Any, aot: bool) -> Any:
        assert aot
        inputs, shape_inputs, plugin = make(QuickPluginCreationRequest.STRICT_AOT)
        assert not shape_inputs
        found.append(ask(trt, plugin, inputs))
        results = []
        for text in found[-1]["outputs"]:
            kind, _, shape = text.partition(" ")
            dtype = getattr(trt.DataType, kind)
            held.append(np.zeros(json.loads(shape), trt.nptype(dtype)))
            zeros = network.add_constant(held[-1].shape, held[-1]).get_output(0)
            results.append(_read(trt, network, inputs[0], dtype, zeros))
        return SimpleNamespace(get_output=results.__getitem__)

    trt.INetworkDefinition.add_plugin = add_plugin
    return found


def _read(trt: Any, network: Any, given: Any, dtype: Any, zeros: Any) -> Any:
    """Add the sum of a plugin's operand to its result, which so is no constant of the network.

    With constants in their places TensorRT-RTX's compiler fails, as most of a step folds then.
    """
    number, axes = network.add_cast(given, trt.float32).get_output(0), len(tuple(given.shape))
    total = network.add_reduce(number, trt.ReduceOperation.SUM, (1 << axes) - 1, True)
    one = network.add_shuffle(total.get_output(0))
    one.reshape_dims = (1,) * len(tuple(zeros.shape))
    term = network.add_cast(one.get_output(0), dtype).get_output(0)
    return network.add_elementwise(term, zeros, trt.ElementWiseOperation.SUM).get_output(0)


def ask(trt: Any, plugin: Any, inputs: list[Any]) -> dict[str, Any]:
    """Call a plugin as TensorRT does while it builds an engine."""
    types = [tensor.dtype for tensor in inputs]
    assert trt.bool not in types, "TensorRT gives a plugin no BOOL"
    shapes = [tuple(tensor.shape) for tensor in inputs]
    results = plugin.get_output_data_types(types, [len(shape) for shape in shapes])
    given = [[Number(size) for size in shape] for shape in shapes]
    made = [
        tuple(size.value for size in shape)
        for shape in plugin.get_output_shapes(given, [], Numbers)
    ]
    assert [plugin.get_aliased_input(i) for i in range(len(made))] == [-1] * len(made)
    descs = [
        _desc(trt, kind, shape)
        for kind, shape in zip((*types, *results), (*shapes, *made), strict=True)
    ]
    for got, wanted in zip(
        plugin.get_supported_format_combinations(descs, len(inputs)), descs, strict=True
    ):
        assert (got.type, got.format) == (wanted.desc.type, trt.TensorFormat.LINEAR)
    plugin.configure_plugin(descs[: len(inputs)], descs[len(inputs) :])
    assert plugin.get_valid_tactics() == []
    plugin.set_tactic(0)
    launch, sizes = SimpleNamespace(), Sizes()
    plugin.get_launch_params(given, descs, len(inputs), launch, sizes, Numbers)
    static = [desc.desc for desc in descs]
    name, ptx = plugin.get_kernel(static[: len(inputs)], static[len(inputs) :])
    numbers = {key: value.expr.value for key, value in vars(launch).items()}
    _check(ptx.decode(), name, len(inputs), sizes, len(made), numbers)
    return {
        "kernel": name,
        "inputs": [f"{t.name} {list(s)}" for t, s in zip(types, shapes, strict=True)],
        "sizes": [sizes[i].expr.value for i in range(sizes.nbSymExprs)],
        "outputs": [f"{t.name} {list(s)}" for t, s in zip(results, made, strict=True)],
        "grid": [numbers[f"grid_{axis}"] for axis in "xyz"],
    }


class Sizes(dict[int, Any]):
    """A stand-in for ISymExprs."""

    nbSymExprs = 0  # noqa: N815  # TensorRT's name


def _desc(trt: Any, kind: Any, shape: tuple[int, ...]) -> Any:
    desc = trt.DynamicPluginTensorDesc()
    inner = trt.PluginTensorDesc()
    inner.type, inner.format, inner.dims = kind, trt.TensorFormat.LINEAR, shape
    desc.desc = inner
    desc.min = desc.opt = desc.max = shape
    return desc


def _check(
    ptx: str, name: str, inputs: int, sizes: Sizes, outputs: int, numbers: dict[str, int]
) -> None:
    """Check that the kernel takes TensorRT's arguments and has the block that TensorRT starts."""
    entry = ptx.partition(f".visible .entry {name}(")[2].partition(")")[0]
    kinds = [line.split()[1] for line in entry.strip().split(",\n")]
    assert kinds == [".u64"] * inputs + [".u32"] * sizes.nbSymExprs + [".u64"] * outputs
    assert all(kind.dtype.name == "INT32" for kind in sizes.values())
    assert f".reqntid {numbers['block_x']}" in ptx
    assert (numbers["block_y"], numbers["block_z"]) == (1, 1)
    assert 0 <= numbers["shared_mem"] <= AOT_SHARED
