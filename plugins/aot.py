"""Launches as AOT plugins of a TensorRT network.

An engine contains their PTX and launch parameters, so it runs without Triton, Python or a plugin
library. A plugin has its launch's fixed shapes; equal launches share a plugin (docs/plugins.md).
"""

import hashlib
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mtpbuild.plugins.launch import Launch, Launches
from mtpbuild.plugins.ptx import TYPES, compile_launch

NAMESPACE = "mtpbuild"
PORTABLE = 80  # its PTX runs on every later GPU; newer ones don't speed up tiles of 16 rows
TENSORRT = {dtype: name for dtype, (_, name) in TYPES.items() if dtype != torch.bool}
# Plugins can't have BOOL tensors.
TORCH = {name: dtype for dtype, name in TENSORRT.items()} | {"BOOL": torch.int32}


def as_plugins(launches: Callable[..., Launches]) -> Callable[..., Any]:
    """Return a Torch-TensorRT converter for the op with these launches.

    Results that are bool in the op become int32. The converter raises ContractError if TensorRT
    can't launch a kernel.
    """

    def convert(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
        flat_args, form = tree_flatten(args)  # operands may be lists
        operands = [_make_stand_in(arg) for arg in flat_args]
        planned = launches(*tree_unflatten(operands, form))
        read = {id(tensor) for launch in planned.each for tensor in launch.inputs}
        added = {  # id of a launch's tensor -> the network's tensor
            id(operand): _find_operand(ctx, arg, f"{name}_{i}")
            for i, (arg, operand) in enumerate(zip(flat_args, operands, strict=True))
            if isinstance(operand, Tensor) and id(operand) in read
        }
        for launch in planned.each:
            inputs = [added[id(tensor)] for tensor in launch.inputs if tensor is not None]
            layer = ctx.net.add_plugin(plugin(launch)(*inputs), aot=True)
            layer.name = f"{name}/{launch.kernel.__name__}"
            added |= {id(tensor): layer.get_output(i) for i, tensor in enumerate(launch.outputs)}
        results = tree_map(lambda tensor: added[id(tensor)], planned.results)
        if planned.axis is None:
            return results
        return _add_sum(ctx, results, planned.axis, planned.shape, name)

    return convert


def _add_sum(ctx: Any, parts: Any, axis: int, shape: tuple[int, ...] | None, name: str) -> Any:
    """Add the layers for a sum over an axis, reshaped if `shape` is given; no layer casts it."""
    sums = import_module("tensorrt").ReduceOperation.SUM
    layer = ctx.net.add_reduce(parts, sums, 1 << axis, False)
    layer.name = f"{name}/sum"
    if shape is not None:
        layer = ctx.net.add_shuffle(layer.get_output(0))
        layer.reshape_dims = shape
        layer.name = f"{name}/rows"
    return layer.get_output(0)


def _make_stand_in(arg: Any) -> Any:
    """Return a meta tensor like the network's, int32 for bool; numbers and None are unchanged."""
    if arg is None or isinstance(arg, int | float):
        return arg
    shape = tuple(arg.shape)
    assert -1 not in shape, "a plugin has fixed shapes"
    dtype = arg.dtype if isinstance(arg, Tensor) else TORCH[arg.dtype.name]
    return torch.empty(shape, dtype=TORCH["BOOL"] if dtype == torch.bool else dtype, device="meta")


def _find_operand(ctx: Any, arg: Any, name: str) -> Any:
    """Return the network's tensor for an argument, such as a weight; bool is cast to int32."""
    trt = import_module("tensorrt")
    if isinstance(arg, Tensor) and arg.dtype in TENSORRT:
        return ctx.constants.operand(arg, getattr(trt.DataType, TENSORRT[arg.dtype]), name)
    utils = import_module("torch_tensorrt.dynamo.conversion.converter_utils")
    tensor = utils.get_trt_tensor(ctx, arg, name)
    if tensor.dtype.name == "BOOL":
        tensor = ctx.net.add_cast(tensor, trt.int32).get_output(0)
    return tensor


def plugin(launch: Launch) -> Any:
    """Return the launch's plugin in `tensorrt.plugin`; it is registered at the first call."""
    trtp = import_module("tensorrt.plugin")
    identity = [
        *((name, _describe_tensor(tensor)) for name, tensor in _name_inputs(launch).items()),
        *map(_describe_tensor, launch.outputs),
        *(launch.grid, launch.sizes, dict(launch.constants), launch.warps, launch.stages),
    ]
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()
    name = f"{launch.kernel.__name__}_{digest[:8]}"
    if not hasattr(getattr(trtp.op, NAMESPACE, None), name):
        _register(trtp, f"{NAMESPACE}::{name}", launch)
    return getattr(getattr(trtp.op, NAMESPACE), name)


def _register(trtp: Any, plugin_id: str, launch: Launch) -> None:
    """Register a plugin with TensorRT: its outputs' shapes and types, its PTX and its launch."""
    trt = import_module("tensorrt")
    ptx = compile_launch(launch, PORTABLE)
    inputs = dict.fromkeys(_name_inputs(launch), trtp.TensorDesc)

    def outputs(*inputs: Any) -> Any:
        return tuple(
            trtp.from_shape_expr(tuple(tensor.shape), getattr(trt.DataType, TENSORRT[tensor.dtype]))
            for tensor in launch.outputs
        )

    def kernel(*operands: Any) -> Any:
        x, y, z = (*launch.grid, 1, 1)[:3]
        how = trtp.KernelLaunchParams(
            grid_x=x, grid_y=y, grid_z=z, block_x=ptx.threads, shared_mem=ptx.shared
        )
        sizes = trtp.SymIntExprs(len(launch.sizes))
        for i, size in enumerate(launch.sizes):
            sizes[i] = trtp.SymInt32(size)  # a plain int has no width
        return ptx.name, ptx.text, how, sizes

    # TensorRT reads names and types of inputs and the number of outputs from the signatures.
    descriptors = (trtp.TensorDesc,) * len(launch.outputs)
    kinds = (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs)
    _sign(outputs, inputs, descriptors)
    _sign(kernel, {**inputs, "outputs": Parameter.empty, "tactic": int}, kinds)
    trtp.register(plugin_id)(outputs)
    trtp.aot_impl(plugin_id)(kernel)


def _sign(function: Any, operands: dict[str, Any], results: tuple[Any, ...]) -> None:
    place = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [Parameter(name, place, annotation=kind) for name, kind in operands.items()]
    returns = tuple.__class_getitem__(results)
    function.__signature__ = Signature(parameters, return_annotation=returns)


def _name_inputs(launch: Launch) -> dict[str, Tensor]:
    """Return the inputs by parameter name, without those that are None."""
    named = zip(launch.kernel.arg_names, launch.inputs, strict=False)
    return {name: tensor for name, tensor in named if tensor is not None}


def _describe_tensor(tensor: Tensor) -> str:
    return f"{TENSORRT[tensor.dtype]} {list(tensor.shape)}"
