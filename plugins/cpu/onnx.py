"""Operators of the CPU's library in ONNX, and PyTorch operators that are translated to them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnx.defs import OpSchema
from onnxscript import ir
from onnxscript.onnx_opset import opset24 as op
from onnxscript.values import Op, Opset
from torch._library.custom_ops import CustomOpDef

from mtpbuild.plugins.definition import NODES, bind

DOMAIN = "mtpbuild"
SUFFIXES = {ir.DataType.FLOAT: "", ir.DataType.BFLOAT16: "Bf16", ir.DataType.INT64: "Ints"}
KINDS = {int: OpSchema.AttrType.INT, float: OpSchema.AttrType.FLOAT}
TENSORS = [
    f"tensor({kind})"
    for kind in ["float", "float16", "bfloat16", "uint8", "int32", "int64", "bool"]
]
aten = torch.ops.aten


def operator(name: str, inputs: str, outputs: int = 1, **attributes: float) -> Op:
    """Declare an operator of the library, which checks the types of its operands itself.

    inputs: their names; each may be missing. An attribute's type is that of its value.
    """
    parameter, optional = OpSchema.FormalParameter, OpSchema.FormalParameterOption.Optional
    schema = OpSchema(
        name,
        DOMAIN,
        1,
        inputs=[parameter(each, f"{each}_type", param_option=optional) for each in inputs.split()],
        outputs=[parameter(f"output{i}", f"output{i}_type") for i in range(outputs)],
        type_constraints=[
            (f"{each}_type", TENSORS, "")
            for each in (*inputs.split(), *(f"output{i}" for i in range(outputs)))
        ],
        attributes=[OpSchema.Attribute(a, KINDS[type(value)]) for a, value in attributes.items()],
    )
    return Op(Opset(DOMAIN, 1), name, schema)


def node_facet(defined: CustomOpDef) -> Callable[..., Any]:
    """Return the function that emits the node of an op's definition."""

    def emit_own(*operands: Any, **named: Any) -> Any:
        return emit(defined, bind(defined, operands, named))

    return emit_own


def emit(defined: CustomOpDef, known: dict[str, Any], **attributes: float) -> Any:
    """Emit the node of an op's definition.

    known: the operands by name. attributes: those that no operand gives.
    """
    node, overload = NODES[defined], defined._opoverload
    inputs = {}
    for argument in overload._schema.arguments:
        name, value = argument.name, known[argument.name]
        if "Tensor" in str(argument.type):
            inputs[name] = value
        elif name in node.sizes:
            inputs[name] = op.Constant(value_int=value) if isinstance(value, int) else value
        else:
            attributes[node.renamed.get(name, name)] = (
                float(value) if "float" in str(argument.type) else int(value)
            )
    typed = known.get(node.typed)
    suffix = SUFFIXES[ir.DataType.FLOAT if typed is None else typed.dtype]
    attributes |= node.constants
    results = len(overload._schema.returns)
    return operator(node.name + suffix, " ".join(inputs), results, **attributes)(
        *inputs.values(), **attributes
    )


# fp32 weights have no scales. Without N the weight is [.., K, N], not packed.
Product = operator("Product", "x values scales", N=0)
Embedding = operator("Embedding", "tokens values scales")
Norm = operator("Norm", "x weight", epsilon=0.0)
Cos, Sin, LogSoftmax, ArgMax = (
    operator(name, "x") for name in ("Cos", "Sin", "LogSoftmax", "ArgMax")
)
MOST_PARTS = 4  # of a join
JOINS = {
    ir.DataType.FLOAT: operator("Join", "a b c d", axis=0),
    ir.DataType.INT64: operator("JoinInts", "a b c d", axis=0),
}


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
    if others or kind not in JOINS or not 1 < len(parts) <= MOST_PARTS:
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
