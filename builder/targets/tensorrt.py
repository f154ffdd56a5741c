"""Target tensorrt, for data-centre GPUs: Torch-TensorRT's converters, our kernels as plugins."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpbuild.builder.targets.style import GraphStyle
from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.errors import MtpbuildError
from mtpbuild.runtime.flag_groups import flag

if TYPE_CHECKING:
    from mtpbuild.builder.models.config import ModelConfig
    from mtpbuild.builder.plan import Plan
    from mtpbuild.builder.request import BuildRequest

ASSUMED = "10.0"  # of a dry run without a GPU: graphs and sizes are the same for all


@dataclass(frozen=True)
class TensorRtOptions:
    fast_build: bool = flag(False, "Compile sooner, run slower.")
    strip_weights: bool = flag(False, "One file of weights, not 3.")


class TensorRt(Target):
    name = "tensorrt"
    lowering = "mtpbuild.builder.targets.lower_tensorrt"
    Options = TensorRtOptions
    formats = ("fp8", "nvfp4")

    def takes_ranks(self, request: "BuildRequest") -> bool:
        """Only the graph of a rank is there so far, with a part of each expert."""
        ranks = request.ranks
        return request.dry_run and ranks.ep == 1 and not ranks.attention_dp

    def compute_capabilities(
        self, request: "BuildRequest", options: TensorRtOptions
    ) -> tuple[str, ...]:
        """The one of this machine's GPU: TensorRT compiles on the GPU that an engine is for."""
        from mtpbuild.runtime.programs.cuda import Device

        try:
            return (Device(self.name).compute_capability,)
        except MtpbuildError:
            if not request.dry_run:
                raise
            return (ASSUMED,)

    def style(self, options: TensorRtOptions, config: "ModelConfig") -> GraphStyle:
        return GraphStyle(fixed=True, whole_caches=True, step_kernels=True, all_kernels=True)

    def embeds_weights(self, options: TensorRtOptions) -> bool:
        return not options.strip_weights

    def lacks(self, plan: "Plan") -> Iterator[str]:
        if plan.ranks.tp > 1:
            yield f"target {self.name} builds one rank only so far"
        yield from super().lacks(plan)


TARGET = TensorRt()
