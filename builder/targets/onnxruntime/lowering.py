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
import torch

from mtpbuild import plugins
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.targets.onnxruntime.onnx_passes import FOLD_LIMIT
from mtpbuild.builder.targets.onnxruntime.quick_export import export_quickly
from mtpbuild.builder.targets.passes import dump_graph, run_passes
from mtpbuild.builder.weights.placed import ByteRange
from mtpbuild.runtime.contract.manifest import WEIGHTS, TargetInfo

OPSET = 24  # the first with TensorScatter


def info() -> TargetInfo:
    versions = {"opset": str(OPSET), "onnxruntime": ">=1.31"}
    return TargetInfo(name="onnxruntime", hardware="any CPU", versions=versions)


def lower(traced: TracedProgram, weights: Mapping[str, ByteRange], folder: Path) -> str:
    """Write the program beside the weights file; return its file's name."""
    model = _export(traced)
    parameters = _detach_weights(model, weights)
    dump_graph(traced.name, "export", model)
    run_passes(traced.plan.style.pipeline.lowered_passes, model, traced)
    for name, value in parameters.items():
        value.const_value = _make_external(name, value, weights[name], folder)
    model.producer_name, model.producer_version = "mtpbuild", version("mtpbuild")
    file = f"{traced.name}.onnx"
    ir.save(model, folder / file)
    return file


def _export(traced: TracedProgram) -> ir.Model:
    # These loggers warn of a missing torchvision and of detached weights.
    for noisy in ("torch.onnx", "onnx_ir"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    with warnings.catch_warnings(), export_quickly():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            traced.exported,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            custom_translation_table=_list_translations(traced),
            input_names=[spec.name for spec in traced.inputs],
            output_names=[spec.name for spec in traced.outputs],
        )
    assert program is not None
    return program.model


def _list_translations(traced: TracedProgram) -> dict[Any, Callable[..., Any]]:
    """Return the translations of our ops, and of PyTorch's operators that we export differently."""
    pipeline = traced.plan.style.pipeline
    if not pipeline.cpu_library:
        return plugins.facets(pipeline.ops)
    from mtpbuild.plugins.cpu.onnx import PYTORCH

    return plugins.facets({**plugins.NODE_FACETS, **pipeline.ops}) | PYTORCH


def _detach_weights(model: ir.Model, weights: Mapping[str, ByteRange]) -> dict[str, ir.Value]:
    """Drop the parameters' values, so that no pass reads, folds or merges them."""
    parameters = {}
    for name, value in model.graph.initializers.items():
        if name.startswith("model.") and name.removeprefix("model.") in weights:
            parameters[name.removeprefix("model.")] = value
            value.const_value = None
        elif value.const_value is not None:
            assert value.const_value.nbytes < FOLD_LIMIT, f"{name} is not in the weights file"
    return parameters


def _make_external(name: str, value: ir.Value, place: ByteRange, folder: Path) -> ir.ExternalTensor:
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
