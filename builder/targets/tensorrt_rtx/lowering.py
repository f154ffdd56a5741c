"""ONNX -> one TensorRT-RTX engine per program, compiled without a GPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.targets.onnxruntime import lowering as onnx_lowering
from mtpbuild.builder.targets.tensorrt import compiling
from mtpbuild.builder.weights.placed import ByteRange
from mtpbuild.runtime.errors import BuildError
from mtpbuild.runtime.programs.tensorrt_api import make_error_logger, tensorrt_api

NAME = "tensorrt-rtx"


def lower(traced: TracedProgram, weights: Mapping[str, ByteRange], folder: Path) -> str:
    """Write the engine of a program from its ONNX graph; return the engine's file name."""
    graph = folder / onnx_lowering.lower(traced, weights, folder)
    file = f"{traced.name}.engine"
    (folder / file).write_bytes(compile_graph(graph, traced.plan))
    graph.unlink()
    return file


def compile_graph(graph: Path, plan: Plan) -> Any:
    """Compile an ONNX file, whose weights lie beside it; return the engine. Raises BuildError."""
    trt = tensorrt_api(NAME)
    log = make_error_logger(trt)
    builder = trt.Builder(log)
    typed = trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED  # the graph's types are kept
    network = builder.create_network(1 << int(typed))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(graph)):
        reason = " ".join(parser.get_error(0).desc().split())
        raise BuildError(f"TensorRT can't read {graph.stem}: {reason}")
    config = compiling.make_compiler_config(trt, builder, network, plan)
    config.num_compute_capabilities = len(plan.compute_capabilities)
    for i, capability in enumerate(plan.compute_capabilities):
        name = "SM" + capability.replace(".", "")
        config.set_compute_capability(getattr(trt.ComputeCapability, name), i)
    return compiling.compile_network(trt, builder, network, config, graph.stem)
