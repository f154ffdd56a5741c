"""A TensorRT network -> a serialised engine: what both flavours are told in the same words."""

from types import ModuleType
from typing import Any, Literal

from mtpbuild.builder.plan import Plan
from mtpbuild.runtime.errors import BuildError
from mtpbuild.runtime.manifest import TargetInfo
from mtpbuild.runtime.programs.tensorrt_api import errors_of, tensorrt_api

Flavour = Literal["tensorrt", "tensorrt-rtx"]
FAST = 1  # of TensorRT's levels 0 to 5; it takes 3 by itself


def new_network(trt: ModuleType, builder: Any) -> Any:
    """Types are the graph's own."""
    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def new_config(
    trt: ModuleType, builder: Any, network: Any, plan: Plan, *, fast: bool = False
) -> Any:
    """The compiler's settings; fast: it tries fewer kernels."""
    config = builder.create_builder_config()
    # fp32 is fp32: with TF32 a window of four tokens could give other tokens than four steps.
    config.clear_flag(trt.BuilderFlag.TF32)
    if fast:
        config.builder_optimization_level = FAST
    for profile in _profiles(builder, network, plan):
        config.add_optimization_profile(profile)
    return config


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


def compile_network(trt: ModuleType, builder: Any, network: Any, config: Any, program: str) -> Any:
    """The engine's bytes. Raises BuildError with the first error."""
    log = errors_of(trt)
    log.errors.clear()
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise BuildError(f"TensorRT can't compile {program}: {log.first()}")
    return engine


def gpu_info(name: Flavour, plan: Plan) -> TargetInfo:
    """What an engine of either flavour needs to run."""
    capabilities = plan.compute_capabilities
    return TargetInfo(
        name=name,
        hardware=f"NVIDIA GPU of compute capability {' or '.join(capabilities)}",
        versions={name: tensorrt_api(name).__version__},
        compute_capabilities=capabilities,
    )
