"""Target onnxruntime, the embedded default: ONNX graphs for any CPU, without torch at run time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpbuild.builder.targets.style import GraphStyle
from mtpbuild.builder.targets.target import ONNX_PACKAGES, Target
from mtpbuild.runtime.cpu_library import REMEDY, find_library
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import flag
from mtpbuild.runtime.ranks import Ranks

if TYPE_CHECKING:
    from mtpbuild.builder.models.config import ModelConfig
    from mtpbuild.builder.plan import Plan
    from mtpbuild.builder.request import BuildRequest
    from mtpbuild.runtime.contract.manifest import TargetInfo

KERNELS = ("auto", "own", "stock")
TRUNKS = ("auto", "shared", "inline")
# Layers times hidden size squared. In smaller models a step is short: another program to run, and
# sizes that vary, would cost some percent of it, and there is little memory to save.
SHARED_FROM = 1 << 22


@dataclass(frozen=True)
class OnnxOptions:
    trunk: str = flag(
        "auto",
        "Main model in memory: shared: one copy; inline: one per program, faster for small models.",
    )
    kernels: str = flag(
        "auto",
        "Kernels of int8 and int4 weights: own: ours; stock: onnxruntime's; auto: ours if built.",
    )


class OnnxRuntime(Target):
    name = "onnxruntime"
    lowering = "mtpbuild.builder.targets.onnx_graph"
    Options = OnnxOptions
    packages = ONNX_PACKAGES
    formats = ("int8", "int4")

    def check(self, request: "BuildRequest", options: OnnxOptions) -> None:
        for name, known in (("trunk", TRUNKS), ("kernels", KERNELS)):
            if (said := getattr(options, name)) not in known:
                raise UsageError(f"--{name} {said} is unknown; supported: {', '.join(known)}")
        if options.kernels == "own" and find_library() is None:
            raise UsageError(f"--kernels own: the library is not built here: {REMEDY}")

    def style(self, options: OnnxOptions, config: "ModelConfig") -> GraphStyle:
        """A session of onnxruntime packs weights of its own, so the main model gets one session."""
        from mtpbuild.builder.models import family_of

        large = config.num_hidden_layers * config.hidden_size**2 >= SHARED_FROM
        shared = large if options.trunk == "auto" else options.trunk == "shared"
        if shared and family_of(config).recurrent(config, Ranks()):
            if options.trunk == "shared":
                raise UsageError("--trunk shared: a step's verdict advances this model's states")
            shared = False
        own = options.kernels != "stock" and find_library() is not None
        return GraphStyle(shared_trunk=shared, cpu_kernels=own)

    def info(self, plan: "Plan") -> "TargetInfo":
        from mtpbuild.builder.targets.onnx_graph import OPSET
        from mtpbuild.runtime.contract.manifest import TargetInfo

        versions = {"opset": str(OPSET), "onnxruntime": ">=1.31"}
        return TargetInfo(name=self.name, hardware="any CPU", versions=versions)


TARGET = OnnxRuntime()
