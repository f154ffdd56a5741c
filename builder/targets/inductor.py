"""Target inductor: AOTInductor packages for a CPU or an NVIDIA GPU, for one rank or several."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpbuild.builder.graph.pipelines import INDUCTOR, INDUCTOR_CUDA
from mtpbuild.builder.graph.style import Attends, GraphStyle, Sizes
from mtpbuild.builder.targets.capability import GPUS, architecture, dotted
from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.checks import check_one_of
from mtpbuild.runtime.contract.sums import RANKS
from mtpbuild.runtime.errors import BuildError, EngineError, UsageError, explain_missing_package
from mtpbuild.runtime.flag_groups import flag

if TYPE_CHECKING:
    from mtpbuild.builder.checkpoint.config import ModelConfig
    from mtpbuild.builder.plan.plan import Plan
    from mtpbuild.builder.plan.request import BuildRequest
    from mtpbuild.runtime.gpu.torch_cuda import Gpu

DEVICES = ("cpu", "cuda")
STRATEGIES = ("nccl", "one-shot")
ASSUMED = "10.0"  # compute capability of a dry run without a GPU
DTYPES = ("float32", "bfloat16")  # not float16: DeepSeek's activations overflow it


@dataclass(frozen=True)
class InductorOptions:
    device: str = flag("cpu", "cpu or cuda.")
    dtype: str = flag("float32", "Type of weights and caches: float32 or bfloat16.")
    compute_capability: str | None = flag(
        None,
        "With --device cuda: build for a GPU that need not be here: sm80, sm90, sm100, sm120.",
    )
    allreduce_strategy: str = flag(
        "nccl",
        "With --device cuda: sums between ranks: nccl; one-shot for small ones, where GPUs read "
        "each other's memory.",
    )


class Inductor(Target):
    name = "inductor"
    lowering = "mtpbuild.builder.targets.lower_inductor"
    Options = InductorOptions
    packages = ("torch", "triton")
    formats = ("fp8", "nvfp4")
    several_ranks = True
    gpu_attention = (Attends.LATENT, Attends.CHOSEN)

    def check(self, request: "BuildRequest", options: InductorOptions) -> None:
        for name, value, known in (
            ("--device", options.device, DEVICES),
            ("--dtype", options.dtype, DTYPES),
            ("--allreduce-strategy", options.allreduce_strategy, STRATEGIES),
        ):
            check_one_of(value, known, name)
        check_capability(options)
        if options.allreduce_strategy != STRATEGIES[0] and (
            options.device != "cuda" or not 1 < request.ranks.tp <= RANKS
        ):
            raise UsageError(
                f"--allreduce-strategy {options.allreduce_strategy} is for --device cuda and "
                f"--tp 2 to {RANKS}"
            )

    def compute_capabilities(
        self, request: "BuildRequest", options: InductorOptions
    ) -> tuple[str, ...]:
        """Return the capability that the user gave, or that of this machine's GPU.

        A dry run without a GPU assumes one, and `lacks` reports the missing GPU.
        """
        if options.device == "cpu":
            return ()
        if options.compute_capability is not None:
            return (dotted(options.compute_capability),)
        try:
            return (describe_this_gpu().compute_capability,)
        except EngineError as error:
            if request.dry_run:
                return (ASSUMED,)
            raise BuildError(with_remedy(error)) from None

    def lacks(self, plan: "Plan") -> Iterator[str]:
        if plan.options.device == "cuda" and plan.options.compute_capability is None:
            try:
                describe_this_gpu()
            except EngineError as error:
                yield with_remedy(error)
        yield from super().lacks(plan)

    def check_machine(self, plan: "Plan") -> None:
        from mtpbuild.builder.targets.lower_inductor import check

        check(plan)

    def style(self, options: InductorOptions, config: "ModelConfig") -> GraphStyle:
        if options.device == "cpu":
            return GraphStyle(
                formats=self.formats,
                dtype=options.dtype,  # type: ignore[arg-type]
                pipeline=INDUCTOR,
            )
        return GraphStyle(
            for_gpu=True,
            sizes=Sizes.WHOLE_CACHES,
            pipeline=INDUCTOR_CUDA,
            formats=self.formats,
            overlap=True,
            dtype=options.dtype,  # type: ignore[arg-type]
        )

    def compiling(self) -> AbstractContextManager[None]:
        from mtpbuild.builder.targets.lower_inductor import share_kernels

        return share_kernels()


def describe_this_gpu() -> "Gpu":
    with explain_missing_package("target inductor", "build", "torch"):
        from mtpbuild.runtime.gpu import torch_cuda

    return torch_cuda.Gpu()


def with_remedy(error: EngineError) -> str:
    """Append to the error's message how to build without a GPU."""
    return f"{error}; --compute-capability sm90 (or another one) builds without a GPU"


def check_capability(options: InductorOptions) -> None:
    """Raise UsageError for a compute capability that cross-compilation does not support."""
    capability = options.compute_capability
    if capability is None:
        return
    if options.device == "cpu":
        raise UsageError(f"--compute-capability {capability} is for --device cuda")
    if dotted(capability) not in GPUS:
        known = ", ".join(f"sm{architecture(capability)}" for capability in GPUS)
        raise UsageError(
            f"--compute-capability {capability}: target inductor compiles for one of {known}"
        )


TARGET = Inductor()
