"""Target tensorrt-rtx: engines for RTX GPUs, compiled from ONNX on any machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.graph.style import Attends, GraphStyle
from mtpbuild.builder.targets.capability import dotted
from mtpbuild.builder.targets.onnxruntime.pipeline import PORTABLE
from mtpbuild.builder.targets.target import ONNX_PACKAGES
from mtpbuild.builder.targets.tensorrt import PROGRAMS, TensorRtFlavour
from mtpbuild.runtime.errors import BuildError, UsageError
from mtpbuild.runtime.flag_groups import flag

if TYPE_CHECKING:
    from mtpbuild.builder.plan.plan import Plan
    from mtpbuild.builder.plan.request import BuildRequest
    from mtpbuild.builder.program.opened_model import OpenedModel
    from mtpbuild.builder.program.trace import TracedProgram
    from mtpbuild.builder.weights.placed import ByteRange

# GPUs for which TensorRT-RTX compiles fp32 programs. It supports sm75, too, but without fp32
# products.
GPUS = {"8.0": "sm80", "8.6": "sm86", "8.9": "sm89", "12.0": "sm120", "12.1": "sm121"}
FLAG = "--compute-capability"
SORTED = 3840  # most values that TopK sorts; decode_mixed's top-k and top-p sort the vocabulary


@dataclass(frozen=True)
class TensorRtRtx(TensorRtFlavour):
    compute_capability: str | None = flag(None, "GPUs to compile for, such as sm89 or sm89,sm120.")

    name = "tensorrt-rtx"
    packages = (*ONNX_PACKAGES, "tensorrt-rtx-cu13-libs")
    uses = ("mtpbuild.builder.targets.onnxruntime", "mtpbuild.builder.targets.tensorrt")
    gpu_attention = (Attends.LATENT,)

    def lower(
        self, traced: "TracedProgram", weights: Mapping[str, "ByteRange"], folder: Path
    ) -> str:
        from mtpbuild.builder.targets.tensorrt_rtx import lowering

        return lowering.lower(traced, weights, folder)

    @property
    def style(self) -> GraphStyle:
        """Embedded weights, as taking them out (REFIT, STRIP_PLAN) would need a GPU."""
        return GraphStyle(
            for_gpu=True,
            whole_caches=True,
            all_slots=True,
            pipeline=PORTABLE,
            embeds_weights=True,
        )

    def compute_capabilities(self, request: "BuildRequest") -> tuple[str, ...]:
        """Turn `sm89,sm120` into ("8.9", "12.0"), in rising order."""
        known = ", ".join(GPUS.values())
        if self.compute_capability is None:
            raise UsageError(f"target {self.name} needs {FLAG}: of {known} those of your GPUs")
        capabilities = self.compute_capability.split(",")
        for text in capabilities:
            if dotted(text) not in GPUS:
                raise UsageError(
                    f"{FLAG} {text}: TensorRT-RTX engines are for RTX GPUs, not for data-centre "
                    f"GPUs such as Hopper; supported: {known}"
                )
        return tuple(name for name in GPUS if name in map(dotted, capabilities))

    def check_model(self, model: "OpenedModel", plan: "Plan") -> None:
        """Raise BuildError for a vocabulary that TensorRT-RTX can't sort."""
        if plan.config.vocab_size > SORTED:
            raise BuildError(
                f"target {self.name}: the model has {plan.config.vocab_size} tokens, and "
                f"TensorRT-RTX sorts at most {SORTED} values, which sampling needs"
            )

    def check_machine(self, plan: "Plan") -> None:
        from mtpbuild.builder.targets.tensorrt_rtx import lowering  # noqa: F401  # is all there?
        from mtpbuild.runtime.programs.tensorrt_api import tensorrt_api

        tensorrt_api(self.name)

    def count_loaded_weights(self, model: "OpenedModel", plan: "Plan") -> int:
        return PROGRAMS * super().count_loaded_weights(model, plan)


TARGET = TensorRtRtx()
