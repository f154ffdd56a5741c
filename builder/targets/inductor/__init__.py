"""Target inductor: AOTInductor packages for a CPU or an NVIDIA GPU, for one rank or several."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.graph.style import Attends, GraphStyle
from mtpbuild.builder.targets.capability import ASSUMED, GPUS, architecture, dotted
from mtpbuild.builder.targets.inductor.pipeline import INDUCTOR, INDUCTOR_CUDA, ONE_SHOT
from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.checks import check_one_of
from mtpbuild.runtime.contract.sums import RANKS
from mtpbuild.runtime.errors import BuildError, EngineError, UsageError, explain_missing_package
from mtpbuild.runtime.flag_groups import flag

if TYPE_CHECKING:
    from mtpbuild.builder.plan.plan import Plan
    from mtpbuild.builder.plan.request import BuildRequest
    from mtpbuild.builder.program.trace import TracedProgram
    from mtpbuild.builder.weights.placed import ByteRange
    from mtpbuild.runtime.contract.manifest import TargetInfo
    from mtpbuild.runtime.gpu.torch_cuda import Gpu

DEVICES = ("cpu", "cuda")
STRATEGIES = ("nccl", "one-shot")
DTYPES = ("float32", "bfloat16")  # not float16: DeepSeek's activations overflow it


@dataclass(frozen=True)
class Inductor(Target):
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

    name = "inductor"
    packages = ("torch", "triton")
    formats = ("fp8", "nvfp4")
    several_ranks = True
    gpu_attention = (Attends.LATENT, Attends.CHOSEN, Attends.COMPRESSED)

    @property
    def crosses(self) -> bool:
        """Whether programs are compiled for a GPU that need not be here."""
        return self.compute_capability is not None

    def info(self, plan: "Plan") -> "TargetInfo":
        from mtpbuild.builder.targets.inductor import lowering

        return lowering.info(plan, crosses=self.crosses, strategy=self.allreduce_strategy)

    def lower(
        self, traced: "TracedProgram", weights: Mapping[str, "ByteRange"], folder: Path
    ) -> str:
        from mtpbuild.builder.targets.inductor import lowering

        return lowering.lower(traced, weights, folder, crosses=self.crosses)

    @property
    def style(self) -> GraphStyle:
        on_gpu = self.device == "cuda"
        one_shot = self.allreduce_strategy == "one-shot"
        return GraphStyle(
            for_gpu=on_gpu,
            whole_caches=on_gpu,
            pipeline=ONE_SHOT if one_shot else INDUCTOR_CUDA if on_gpu else INDUCTOR,
            formats=self.formats,
            overlap=on_gpu,
            dtype=self.dtype,  # type: ignore[arg-type]
        )

    def check(self, request: "BuildRequest") -> None:
        for name, value, known in (
            ("--device", self.device, DEVICES),
            ("--dtype", self.dtype, DTYPES),
            ("--allreduce-strategy", self.allreduce_strategy, STRATEGIES),
        ):
            check_one_of(value, known, name)
        self._check_capability()
        if self.allreduce_strategy != STRATEGIES[0] and (
            self.device != "cuda" or not 1 < request.ranks.tp <= RANKS
        ):
            raise UsageError(
                f"--allreduce-strategy {self.allreduce_strategy} is for --device cuda and "
                f"--tp 2 to {RANKS}"
            )

    def _check_capability(self) -> None:
        """Raise UsageError for a compute capability that cross-compilation does not support."""
        if self.compute_capability is None:
            return
        if self.device == "cpu":
            raise UsageError(f"--compute-capability {self.compute_capability} is for --device cuda")
        if dotted(self.compute_capability) not in GPUS:
            known = ", ".join(f"sm{architecture(capability)}" for capability in GPUS)
            raise UsageError(
                f"--compute-capability {self.compute_capability}: target inductor compiles for "
                f"one of {known}"
            )

    def compute_capabilities(self, request: "BuildRequest") -> tuple[str, ...]:
        """Return the capability that the user gave, or that of this machine's GPU.

        A dry run without a GPU assumes one, and `list_missing` reports the missing GPU.
        """
        if self.device == "cpu":
            return ()
        if self.compute_capability is not None:
            return (dotted(self.compute_capability),)
        try:
            return (describe_this_gpu().compute_capability,)
        except EngineError as error:
            if request.dry_run:
                return (ASSUMED,)
            raise BuildError(with_remedy(error)) from None

    def list_missing(self, plan: "Plan") -> Iterator[str]:
        if self.device == "cuda" and self.compute_capability is None:
            try:
                describe_this_gpu()
            except EngineError as error:
                yield with_remedy(error)
        yield from super().list_missing(plan)

    def check_machine(self, plan: "Plan") -> None:
        from mtpbuild.builder.targets.inductor import lowering

        lowering.check(plan, crosses=self.crosses)

    def compiling(self) -> AbstractContextManager[None]:
        from mtpbuild.builder.targets.inductor import lowering

        return lowering.share_kernels()


def describe_this_gpu() -> "Gpu":
    with explain_missing_package("target inductor", "build", "torch"):
        from mtpbuild.runtime.gpu import torch_cuda

    return torch_cuda.Gpu()


def with_remedy(error: EngineError) -> str:
    """Append to the error's message how to build without a GPU."""
    return f"{error}; --compute-capability sm90 (or another one) builds without a GPU"


TARGET = Inductor()
