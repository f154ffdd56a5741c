"""ExportedProgram -> ONNX, whose weights are byte ranges of the engine's safetensors file.

Target onnxruntime runs these graphs, and tensorrt-rtx compiles them.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from onnxscript.optimizer import _constant_folding as folding

from mtpbuild import plugins
from mtpbuild.builder.program.trace import Traced
from mtpbuild.builder.targets.passes.chains import JoinChains
from mtpbuild.builder.targets.passes.cpu_graph import FuseAround
from mtpbuild.builder.weights.placed import Placed
from mtpbuild.runtime.contract.manifest import WEIGHTS

aten = torch.ops.aten
OPSET = 24  # the first with TensorScatter
FOLD_LIMIT = 1 << 20  # bytes; larger constants are weights
ONNX: plugins.FacetTable = dict.fromkeys(
    (
        plugins.accept_rewind,
        plugins.causal_conv,
        plugins.choose_rows,
        plugins.delta_advance,
        plugins.delta_rule,
        plugins.experts,
        plugins.grouped_attention,
        plugins.index_keys,
        plugins.kv_write,
        plugins.last_inputs,
        plugins.mla_attention,
        plugins.rope,
        plugins.take_rows,
    ),
    "onnx",
)


class ShareSizes(ir.passes.InPlacePass):  # type: ignore[misc]
    """A pass that reads every named size (`rows`, `chunk`, `batch`) from one input of the graph.

    Otherwise each layer would read the sizes from its own cache, and equal values would have
    different names: there would be a mask per layer instead of one.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        named: dict[str, tuple[ir.Value, int]] = {}
        for value in model.graph.inputs:
            for axis, size in enumerate(value.shape or ()):
                if isinstance(size, ir.SymbolicDim) and size.value is not None:
                    named.setdefault(size.value, (value, axis))
        changed = False
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
            changed = True
        return ir.passes.PassResult(model, changed)


# Before: the exporter's graph, with a mask per attention. After: one mask, folded shapes, and no
# metadata of the build machine.
PASSES = ir.passes.Sequential(
    common.InlinePass(),
    ir.passes.PassManager(
        [
            folding.FoldConstantsPass(
                shape_inference=True, input_size_limit=FOLD_LIMIT, output_size_limit=FOLD_LIMIT
            ),
            common.RemoveUnusedNodesPass(),
        ],
        steps=2,
    ),
    ShareSizes(),
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    common.DeduplicateInitializersPass(size_limit=FOLD_LIMIT),
    common.CommonSubexpressionEliminationPass(),
    common.RemoveUnusedNodesPass(),
    common.RemoveUnusedOpsetsPass(),
    common.OutputFixPass(),
    common.NameFixPass(),
    common.ClearMetadataAndDocStringPass(),
)


def lower(traced: Traced, weights: Mapping[str, Placed], folder: Path) -> str:
    """Write the program beside the weights file; return its file's name."""
    model = _export(traced)
    parameters = _detach_weights(model, weights)
    PASSES(model)
    if traced.cpu_kernels:
        FuseAround()(model)
        JoinChains()(model)
    for name, value in parameters.items():
        value.const_value = _external(name, value, weights[name], folder)
    model.producer_name, model.producer_version = "mtpbuild", version("mtpbuild")
    file = f"{traced.name}.onnx"
    ir.save(model, folder / file)
    return file


Rewrite = Callable[[torch.fx.Node], tuple[tuple[Any, ...], dict[str, Any]]]


def _reshape(node: torch.fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the `reshape` that is equal to a node.

    The operator infers the last size that varies. The other varying sizes are given by `unflatten`,
    or read from the operand.
    """
    operand, sizes = node.args[0], [*node.meta["val"].shape]
    assert isinstance(operand, torch.fx.Node)
    own = [*operand.meta["val"].shape]
    varying = [axis for axis, size in enumerate(sizes) if not isinstance(size, int)]
    said = dict[int, torch.fx.Node]()
    if node.target is aten.unflatten.int:
        _, first, parts = node.args
        assert isinstance(first, int)
        assert isinstance(parts, list)
        places = enumerate(parts, first % len(own))
        said = {axis: size for axis, size in places if isinstance(size, torch.fx.Node)}
    for axis in varying[:-1]:
        if axis in said:
            sizes[axis] = said[axis]
            continue
        with node.graph.inserting_before(node):
            place = operand, own.index(sizes[axis])
            size = node.graph.call_function(aten.sym_size.int, place)
        size.meta["val"], sizes[axis] = sizes[axis], size
    for axis in varying[-1:]:
        sizes[axis] = -1
    return (operand, sizes), {}


# Operators that torch.onnx supports only decomposed, or exports worse, and our replacements.
PLAIN: dict[Any, tuple[Any, Rewrite]] = {
    aten.__and__.Tensor: (aten.bitwise_and.Tensor, lambda node: (node.args, {})),
    aten.__or__.Tensor: (aten.bitwise_or.Tensor, lambda node: (node.args, {})),
    aten.mT.default: (aten.transpose.int, lambda node: ((node.args[0], -2, -1), {})),
    aten.to.dtype: (aten._to_copy.default, lambda node: (node.args[:1], {"dtype": node.args[1]})),
    aten.flatten.using_ints: (aten.reshape.default, _reshape),
    aten.unflatten.int: (aten.reshape.default, _reshape),
}


def _write_plainly(exported: torch.export.ExportedProgram) -> None:
    """Apply `PLAIN`, in branches too, and mark the program as decomposed.

    torch.onnx would trace the program again to decompose it, which takes as long as the first
    trace. The export fails at any operator that it still does not know.
    """
    for graph in exported.graph_module.modules():
        assert isinstance(graph, torch.fx.GraphModule)
        for node in graph.graph.nodes:
            if node.target in PLAIN:
                target, rewrite = PLAIN[node.target]
                node.args, node.kwargs = rewrite(node)
                node.target = target
        graph.recompile()
    exported.run_decompositions = lambda *_: exported


def _export(traced: Traced) -> ir.Model:
    _write_plainly(traced.exported)
    # They warn of missing torchvision and of detached weights.
    for noisy in ("torch.onnx", "onnx_ir"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            traced.exported,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            custom_translation_table=_translations(traced),
            input_names=[spec.name for spec in traced.inputs],
            output_names=[spec.name for spec in traced.outputs],
        )
    assert program is not None
    return program.model


def _translations(traced: Traced) -> dict[Any, Callable[..., Any]]:
    """Return the translations of our ops, and of PyTorch's operators that we export differently."""
    if not traced.cpu_kernels:
        return plugins.facets(ONNX)
    from mtpbuild.plugins.cpu.onnx import PYTORCH

    return plugins.facets({**ONNX, **plugins.CPU}) | PYTORCH


def _detach_weights(model: ir.Model, weights: Mapping[str, Placed]) -> dict[str, ir.Value]:
    """Drop the parameters' values, so that no pass reads, folds or merges them."""
    parameters = {}
    for name, value in model.graph.initializers.items():
        if name.startswith("model.") and name.removeprefix("model.") in weights:
            parameters[name.removeprefix("model.")] = value
            value.const_value = None
        elif value.const_value is not None:
            assert value.const_value.nbytes < FOLD_LIMIT, f"{name} is not in the weights file"
    return parameters


def _external(name: str, value: ir.Value, place: Placed, folder: Path) -> ir.ExternalTensor:
    """Return a reference into the engine's weights file, so that no weight is stored twice."""
    return ir.ExternalTensor(
        WEIGHTS,
        place.offset,
        place.size,
        value.dtype or ir.DataType.FLOAT,
        name=value.name or name,
        shape=ir.Shape(value.shape or ()),
        base_dir=str(folder),
    )
