"""Target tensorrt-rtx: ONNX -> one TensorRT-RTX engine per program, compiled without a GPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mtpbuild.builder.plan import Plan
from mtpbuild.builder.targets.onnxruntime import TARGET as ONNX
from mtpbuild.builder.trace import Traced
from mtpbuild.builder.weights_file import Placed
from mtpbuild.runtime.errors import BuildError
from mtpbuild.runtime.manifest import TargetInfo
from mtpbuild.runtime.programs.tensorrt_api import errors_of, tensorrt_api

NAME: Final = "tensorrt-rtx"
SORTED = 3840  # values that TopK takes; filters of decode_mixed sort the vocabulary


class TensorRtRtxTarget:
    embeds_weights = True  # taking them out again (REFIT, STRIP_PLAN) needs a GPU

    def check(self, plan: Plan) -> None:
        tensorrt_api(NAME)
        if plan.config.vocab_size > SORTED:
            raise BuildError(
                f"target {NAME}: the model has {plan.config.vocab_size} tokens, and "
                f"TensorRT-RTX sorts at most {SORTED} values, which sampling needs"
            )

    def lower(self, traced: Traced, weights: Mapping[str, Placed], folder: Path) -> str:
        graph = folder / ONNX.lower(traced, weights, folder)
        file = f"{traced.name}.engine"
        (folder / file).write_bytes(compile_graph(graph, traced.plan))
        graph.unlink()
        return file

    def info(self, plan: Plan) -> TargetInfo:
        capabilities = plan.compute_capabilities
        return TargetInfo(
            name=NAME,
            hardware=f"NVIDIA GPU of compute capability {' or '.join(capabilities)}",
            versions={NAME: tensorrt_api(NAME).__version__},
            compute_capabilities=capabilities,
        )


def compile_graph(graph: Path, plan: Plan) -> Any:
    """A serialised engine of an ONNX file; its weights lie beside it. Raises BuildError."""
    trt = tensorrt_api(NAME)
    log = errors_of(trt)
    log.errors.clear()
    builder = trt.Builder(log)
    # Types are the graph's own; caches are written where they lie (KVCacheUpdate).
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(graph)):
        raise _failed(graph, "read", " ".join(parser.get_error(0).desc().split()))
    config = builder.create_builder_config()
    # fp32 is fp32: with TF32 a window of four tokens could give other tokens than four steps.
    config.clear_flag(trt.BuilderFlag.TF32)
    config.num_compute_capabilities = len(plan.compute_capabilities)
    for i, capability in enumerate(plan.compute_capabilities):
        name = "SM" + capability.replace(".", "")
        config.set_compute_capability(getattr(trt.ComputeCapability, name), i)
    for profile in _profiles(builder, network, plan):
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise _failed(graph, "compile", log.first())
    return engine


def _profiles(builder: Any, network: Any, plan: Plan) -> list[Any]:
    """One where a size varies: chunks of a prompt from one token to the plan's, best when full."""
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    varying = [tensor for tensor in inputs if -1 in tuple(tensor.shape)]
    if not varying:
        return []
    profile = builder.create_optimization_profile()
    for tensor in varying:
        least, most = (
            tuple(chunk if size == -1 else size for size in tensor.shape)
            for chunk in (1, plan.prefill_chunk)
        )
        profile.set_shape(tensor.name, least, most, most)
    return [profile]


def _failed(graph: Path, verb: str, reason: str) -> BuildError:
    return BuildError(f"TensorRT-RTX can't {verb} {graph.stem}: {reason}")


TARGET = TensorRtRtxTarget()
