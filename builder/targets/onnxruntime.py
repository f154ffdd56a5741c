"""Target onnxruntime, the default for embedding: ONNX graphs for any CPU, run without torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.host import physical_memory
from mtpbuild.builder.targets.style import GraphStyle
from mtpbuild.builder.targets.target import ONNX_PACKAGES, Target
from mtpbuild.runtime.cpu_library import REMEDY, find_library
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import flag

if TYPE_CHECKING:
    from mtpbuild.builder.models.config import ModelConfig
    from mtpbuild.builder.opened_model import OpenedModel
    from mtpbuild.builder.plan import Plan
    from mtpbuild.builder.request import BuildRequest
    from mtpbuild.runtime.contract.manifest import TargetInfo

KERNELS = ("auto", "own", "stock")
CACHES = ("float32", "bfloat16")


@dataclass(frozen=True)
class OnnxOptions:
    kernels: str = flag(
        "auto",
        "Kernels of products and attention: own: ours; stock: onnxruntime's; auto: ours if built.",
    )
    cache_dtype: str = flag(
        "float32", "Type of caches: float32, or bfloat16 in int8 and int4 engines on our kernels."
    )


class OnnxRuntime(Target):
    name = "onnxruntime"
    lowering = "mtpbuild.builder.targets.onnx_graph"
    Options = OnnxOptions
    packages = ONNX_PACKAGES
    formats = ("int8", "int4")
    may_be_exact = True

    def check(self, request: "BuildRequest", options: OnnxOptions) -> None:
        if (said := options.kernels) not in KERNELS:
            raise UsageError(f"--kernels {said} is unknown; supported: {', '.join(KERNELS)}")
        if (said := options.cache_dtype) not in CACHES:
            raise UsageError(f"--cache-dtype {said} is unknown; supported: {', '.join(CACHES)}")
        if options.kernels == "own" and find_library() is None:
            raise UsageError(f"--kernels own: the library is not built here: {REMEDY}")
        if request.exact and options.kernels == "stock":
            raise UsageError("--exact: onnxruntime's products are not: leave out --kernels stock")
        if request.exact and find_library() is None:
            raise UsageError(f"--exact needs our kernels, which are not built here: {REMEDY}")

    def inexact(self, files: Iterable[Path]) -> str | None:
        from mtpbuild.builder.targets.exact import others

        found = sorted(others(files))
        return f"operators that nobody has probed: {', '.join(found)}" if found else None

    def style(self, options: OnnxOptions, config: "ModelConfig") -> GraphStyle:
        return GraphStyle(
            cpu_kernels=options.kernels != "stock" and find_library() is not None,
            cache_dtype="bfloat16" if options.cache_dtype == "bfloat16" else None,
        )

    def check_model(self, model: "OpenedModel", plan: "Plan") -> None:
        """Refuse a model whose weights, as packed by onnxruntime, exceed this machine's memory."""
        if plan.style.cache_dtype is not None and not model.may_halve_caches:
            raise UsageError(
                f"--cache-dtype bfloat16 is for engines of int8 or int4 weights on our kernels: "
                f"{model.source.name} would be one of {model.weights_type}"
                + ("" if model.by_cpu_kernels else " without them")
            )
        memory = physical_memory()
        if memory is not None:
            refuse_copies(model, plan, memory)

    def info(self, plan: "Plan") -> "TargetInfo":
        from mtpbuild.builder.targets.onnx_graph import OPSET
        from mtpbuild.runtime.contract.manifest import TargetInfo

        versions = {"opset": str(OPSET), "onnxruntime": ">=1.31"}
        return TargetInfo(name=self.name, hardware="any CPU", versions=versions)


def refuse_copies(model: "OpenedModel", plan: "Plan", memory: int) -> None:
    """Raise UsageError if the copies of weights that onnxruntime packs exceed `memory` bytes.

    Each program's session packs its own copy of the products' weights. Weights that our kernels
    read are memory-mapped instead.
    """
    programs = 1 + plan.score + 2 * (plan.nextn + 1 if plan.adaptive else 1)
    each = model.stock_bytes
    if programs * each <= memory:
        return
    remedy = "say --weights int4 or int8"  # integers whose scales are fp32
    if find_library() is None:
        remedy = REMEDY
    elif plan.options.kernels == "stock":
        remedy = "leave out --kernels stock"
    raise UsageError(
        f"{model.source.name}: onnxruntime would pack {each / 1e9:.1f} GB of weights for each of "
        f"{programs} programs, and this machine's memory is {memory / 1e9:.1f} GB; kernels of ours "
        f"pack none: {remedy}"
    )


TARGET = OnnxRuntime()
