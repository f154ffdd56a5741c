"""Operators of the CPU's library in ONNX, and PyTorch operators that are translated to them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from onnxscript import ir
from onnxscript.onnx_opset import opset24 as op
from onnxscript.values import Op

from mtpbuild.plugins.matmul_nbits.onnx import (
    BFLOATS,
    FLOATS,
    HALVES,
    INTS,
    ROWS,
    WEIGHT,
    contrib,
)

DOMAIN = "mtpbuild"
aten = torch.ops.aten


def operator(
    name: str, inputs: Mapping[str, str], attributes: Mapping[str, Any] = {}, **others: Any
) -> Op:
    """Declare an operator of the library, as `contrib` does for ONNX Runtime's."""
    return contrib(name, inputs, attributes, domain=DOMAIN, **others)


# fp32 weights have no scales. Without N the weight is [.., K, N], not packed.
Product = operator(
    "Product", {"x": FLOATS, "values": WEIGHT, "scales": HALVES}, {"N": 0}, optional=("scales",)
)
Attention = operator(
    "Attention",
    {
        **{"q": FLOATS, "cache": ROWS, "fresh": FLOATS, "base": INTS, "first": INTS},
        "chosen": INTS,
    },
    {"scale": 0.0, "groups": 0, "values": 0, "latent": 0, "written": 0, "heads": 0},
    optional=("chosen",),
)


def row_operators(
    name: str, inputs: Mapping[str, str], attributes: Mapping[str, Any], optional: Sequence[str]
) -> dict[Any, Op]:
    """Declare the operators that compute cache rows and write them; return them by cache type."""
    kinds = {ir.DataType.FLOAT: (name, FLOATS), ir.DataType.BFLOAT16: (f"{name}Bf16", BFLOATS)}
    return {
        kind: operator(
            own,
            {**inputs, "cache": rows, "start": INTS},
            attributes,
            optional=(*optional, "cache", "start"),
            outputs=(FLOATS, FLOATS, rows),
        )
        for kind, (own, rows) in kinds.items()
    }


Norm = operator("Norm", {"x": FLOATS, "weight": FLOATS}, {"epsilon": 0.0})


Cos, Sin, LogSoftmax = (operator(name, {"x": FLOATS}) for name in ("Cos", "Sin", "LogSoftmax"))
ArgMax = operator("ArgMax", {"x": FLOATS}, outputs=(INTS,))
Embedding = operator(
    "Embedding", {"tokens": INTS, "values": WEIGHT, "scales": HALVES}, optional=("scales",)
)
PARTS = ("a", "b", "c", "d")  # a join takes up to four tensors
Join, JoinInts = (
    operator(name, dict.fromkeys(PARTS, kind), {"axis": 0}, optional=PARTS[2:], outputs=(kind,))
    for name, kind in (("Join", FLOATS), ("JoinInts", INTS))
)
JOINS = {ir.DataType.FLOAT: Join, ir.DataType.INT64: JoinInts}


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
        return op.Unsqueeze(best, op.Constant(value_ints=[-1])) if keepdim else best
    return op.ArgMax(x, axis=axis, keepdims=int(keepdim))


def cat(parts: Sequence[Any], axis: int = 0) -> Any:
    [kind, *others] = {part.dtype for part in parts}
    if others or kind not in JOINS or not 1 < len(parts) <= len(PARTS):
        return op.Concat(*parts, axis=axis)
    return JOINS[kind](*parts, axis=axis % len(parts[0].shape))


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
    aten.rms_norm.default: rms_norm,
    aten.log_softmax.int: log_softmax,  # the same bits as a greedy step's log-probabilities
}
