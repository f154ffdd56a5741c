"""Operators of the CPU's library in ONNX, and PyTorch operators that are translated to them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import ir
from onnxscript.onnx_opset import opset24 as op
from torch._library.custom_ops import CustomOpDef

from mtpbuild.plugins.definition import NODES, bind
from mtpbuild.plugins.onnx import declare_operator

DOMAIN = "mtpbuild"  # of the operators of the CPU's library
SUFFIXES = {ir.DataType.FLOAT: "", ir.DataType.BFLOAT16: "Bf16", ir.DataType.INT8: "Int8"}
SUFFIXES |= {ir.DataType.INT64: "Ints"}
aten = torch.ops.aten


def make_node_facet(defined: CustomOpDef) -> Callable[..., Any]:
    """Return the function that emits the node of an op's definition."""
    node = NODES[defined]
    schema = defined._opoverload._schema

    def emit(*operands: Any, **named: Any) -> Any:
        known = bind(defined, operands, named)
        inputs = dict[str, Any]()
        attributes = dict(node.attributes(known))
        for argument in schema.arguments:
            name, value = argument.name, known[argument.name]
            if "Tensor" in str(argument.type):
                inputs[name] = value
            elif name in node.sizes:
                inputs[name] = op.Constant(value_int=value) if isinstance(value, int) else value
            else:
                kind = float if "float" in str(argument.type) else int
                attributes[node.renamed.get(name, name)] = kind(value)
        typed = known.get(node.typed)
        name = node.name + SUFFIXES[ir.DataType.FLOAT if typed is None else typed.dtype]
        declared = declare_operator(
            DOMAIN, name, " ".join(inputs), len(schema.returns), **attributes
        )
        return declared(*inputs.values(), **attributes)

    return emit


# fp32 weights have no scales. N: outputs of a packed weight; without N the weight is [.., K, N].
Product = declare_operator(DOMAIN, "Product", "x values scales", N=0)
Embedding = declare_operator(DOMAIN, "Embedding", "tokens values scales", N=0)
Norm = declare_operator(DOMAIN, "Norm", "x weight", epsilon=0.0)
Cos, Sin, LogSoftmax, ArgMax, Sum = (
    declare_operator(DOMAIN, name, "x") for name in ("Cos", "Sin", "LogSoftmax", "ArgMax", "Sum")
)
JOIN_OPERANDS = "a b c d"  # as many as one join may have
JOINED = (ir.DataType.FLOAT, ir.DataType.INT64)  # types that can be joined


def matmul(x: Any, w: Any) -> Any:
    """Emit the library's product if w is a weight, else ONNX's MatMul of two computed values."""
    return Product(x, w) if is_weight(w) else op.MatMul(x, w)


def is_weight(value: Any) -> bool:
    """Return whether a value is a parameter; casts to its own type, removed later, are ignored."""
    node = value.producer()
    if node is None:
        return value.name is not None and value.name.startswith("p_")  # as torch.export names them
    return node.op_type in ("Cast", "Identity") and is_weight(node.inputs[0])


def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    assert weight is not None
    assert eps is not None
    return Norm(x, weight, epsilon=eps)


def log_softmax(x: Any, axis: int, dtype: Any = None) -> Any:
    assert axis in (-1, len(x.shape) - 1)
    return LogSoftmax(x)


def argmax(x: Any, axis: int | None = None, keepdim: bool = False) -> Any:
    assert axis is not None
    if x.dtype == ir.DataType.FLOAT and axis in (-1, len(x.shape) - 1):
        best = ArgMax(x)
        return restore_axis(best, ir.DataType.INT64) if keepdim else best
    return op.ArgMax(x, axis=axis, keepdims=int(keepdim))


def sum_rows(x: Any, axes: Sequence[int], keepdim: bool = False, dtype: Any = None) -> Any:
    """Emit the library's sum of fp32 rows; onnxruntime's depends on a row's place in memory."""
    last = len(x.shape) - 1
    if x.dtype == ir.DataType.FLOAT and [axis % len(x.shape) for axis in axes] == [last]:
        total = Sum(x)
        return restore_axis(total, x.dtype) if keepdim else total
    if x.dtype == ir.DataType.BOOL:
        x = op.Cast(x, to=ir.DataType.INT64)
    return op.ReduceSum(x, op.Constant(value_ints=[*axes]), keepdims=int(keepdim))


def restore_axis(reduced: Any, dtype: ir.DataType) -> Any:
    """Emit a last axis of size 1; onnxruntime can't infer the type if a chain gives the value."""
    reduced.dtype = dtype
    return op.Unsqueeze(reduced, op.Constant(value_ints=[-1]))


def cat(parts: Sequence[Any], axis: int = 0) -> Any:
    [kind, *others] = {part.dtype for part in parts}
    if others or kind not in JOINED or not 1 < len(parts) <= len(JOIN_OPERANDS.split()):
        return op.Concat(*parts, axis=axis)
    join = declare_operator(DOMAIN, "Join" + SUFFIXES[kind], JOIN_OPERANDS, axis=0)
    return join(*parts, axis=axis % len(parts[0].shape))


def embedding(table: Any, tokens: Any, *others: Any) -> Any:
    return Embedding(tokens, table)


# Translations that replace those of torch.onnx in programs with the library's operators.
PYTORCH: dict[Any, Callable[..., Any]] = {
    aten.matmul.default: matmul,
    aten.argmax.default: argmax,
    aten.cat.default: cat,
    aten.embedding.default: embedding,
    aten.cos.default: lambda x: Cos(x),  # onnxruntime rounds the last size % 4 values differently
    aten.sin.default: lambda x: Sin(x),
    aten.sum.dim_IntList: sum_rows,
    aten.rms_norm.default: rms_norm,
    aten.log_softmax.int: log_softmax,  # gives the bits of a greedy step's log-probabilities
}
