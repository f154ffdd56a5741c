"""Simplify the exporter's ONNX graph: one mask for all layers, folded shapes, no metadata."""

from typing import TYPE_CHECKING

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer import _constant_folding as folding

if TYPE_CHECKING:
    from mtpbuild.builder.program.trace import TracedProgram

FOLD_LIMIT = 1 << 20  # bytes; larger constants are weights


def inline_functions(model: ir.Model, traced: "TracedProgram") -> ir.Model:
    """Replace calls of functions by their nodes."""
    common.InlinePass()(model)
    return model


def fold_constants(model: ir.Model, traced: "TracedProgram") -> ir.Model:
    """Compute values that depend on no input, infer shapes, and remove unused nodes."""
    fold = folding.FoldConstantsPass(
        shape_inference=True, input_size_limit=FOLD_LIMIT, output_size_limit=FOLD_LIMIT
    )
    ir.passes.PassManager([fold, common.RemoveUnusedNodesPass()], steps=2)(model)
    return model


def share_sizes(model: ir.Model, traced: "TracedProgram") -> ir.Model:
    """Read every named size (`rows`, `chunk`, `batch`) from one input of the graph.

    Otherwise each layer would read the sizes from its own cache, and have its own copy of every
    value that follows from them, such as the mask.
    """
    named: dict[str, tuple[ir.Value, int]] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                named.setdefault(size.value, (value, axis))
    for node in model.graph:
        if node.op_type != "Shape" or node.inputs[0] is None or not node.inputs[0].shape:
            continue
        shape = node.inputs[0].shape
        start = node.attributes.get_int("start", 0) % len(shape)
        end = node.attributes.get_int("end", len(shape))
        size = shape[start]
        if end != start + 1 or not isinstance(size, ir.SymbolicDim) or size.value not in named:
            continue
        source, axis = named[size.value]
        node.replace_input_with(0, source)
        node.attributes["start"] = ir.AttrInt64("start", axis)
        node.attributes["end"] = ir.AttrInt64("end", axis + 1)
    return model


def merge_equal_nodes(model: ir.Model, traced: "TracedProgram") -> ir.Model:
    """Merge equal constants, then nodes that compute the same value."""
    ir.passes.Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(size_limit=FOLD_LIMIT),
        common.CommonSubexpressionEliminationPass(),
    )(model)
    return model


def tidy(model: ir.Model, traced: "TracedProgram") -> ir.Model:
    """Remove unused nodes, name all values, and drop metadata of the build machine."""
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
        common.ClearMetadataAndDocStringPass(),
    )(model)
    return model
