"""Target onnxruntime, the embedded default: ONNX graphs for any CPU, without torch at run time."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.targets.target import Target

if TYPE_CHECKING:
    from mtpbuild.builder.plan import Plan
    from mtpbuild.builder.program.trace import Traced
    from mtpbuild.builder.weights_file import Placed
    from mtpbuild.runtime.manifest import TargetInfo


class OnnxRuntime(Target):
    name = "onnxruntime"
    formats = ("int8", "int4")
    adaptive = True

    def lower(self, traced: "Traced", weights: Mapping[str, "Placed"], folder: Path) -> str:
        from mtpbuild.builder.targets.lower_onnxruntime import lower

        return lower(traced, weights, folder)

    def info(self, plan: "Plan") -> "TargetInfo":
        from mtpbuild.builder.targets.lower_onnxruntime import OPSET
        from mtpbuild.runtime.manifest import TargetInfo

        versions = {"opset": str(OPSET), "onnxruntime": ">=1.31"}
        return TargetInfo(
            name=self.name,  # type: ignore[arg-type]
            hardware="any CPU",
            versions=versions,
        )


TARGET = OnnxRuntime()
