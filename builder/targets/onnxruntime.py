"""Target onnxruntime, the default for embedding: ONNX graphs for any CPU, run without torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mtpbuild.builder.graph.pipelines import CPU, PORTABLE
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.targets.target import ONNX_PACKAGES, Target
from mtpbuild.runtime.checks import check_one_of
from mtpbuild.runtime.cpu_library import REMEDY, find_library
from mtpbuild.runtime.errors import MissingDependencyError, UsageError
from mtpbuild.runtime.flag_groups import flag

if TYPE_CHECKING:
    from mtpbuild.builder.checkpoint.config import ModelConfig
    from mtpbuild.builder.plan.plan import Plan
    from mtpbuild.builder.plan.request import BuildRequest
    from mtpbuild.builder.program.opened_model import OpenedModel
    from mtpbuild.runtime.contract.manifest import CacheType

CACHES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class OnnxOptions:
    portable: bool = flag(
        False,
        "A graph of standard operators in fp32 for any onnxruntime, such as --provider cuda.",
    )
    cache_dtype: str = flag(
        "float32", "Type of caches: float32, or bfloat16 or int8 in engines of int8 or int4."
    )


class OnnxRuntime(Target):
    name = "onnxruntime"
    lowering = "mtpbuild.builder.targets.onnx_graph"
    Options = OnnxOptions
    packages = ONNX_PACKAGES
    formats = ("int8", "int4")
    may_be_exact = True

    def check(self, request: "BuildRequest", options: OnnxOptions) -> None:
        dtype = check_one_of(options.cache_dtype, CACHES, "--cache-dtype")
        if options.portable and dtype != "float32":
            raise UsageError(
                f"--cache-dtype {dtype}: a graph of standard operators is in fp32: leave out "
                "--portable"
            )
        if options.portable and request.exact:
            raise UsageError("--exact: onnxruntime's products are not: leave out --portable")
        main = None if request.scheme is None else request.scheme.main
        if options.portable and main is not None:
            raise UsageError(
                f"--weights {main}: a graph of standard operators is in fp32: leave out --portable"
            )

    def check_machine(self, plan: "Plan") -> None:
        """Raise MissingDependencyError if the library of CPU kernels is needed, but not built."""
        if plan.style.packs_weights and find_library() is None:
            raise MissingDependencyError(
                f"target {self.name}: the library of CPU kernels is not built here: {REMEDY}; "
                "or build with --portable, without them"
            )
        super().check_machine(plan)

    def inexact(self, files: Iterable[Path]) -> str | None:
        from mtpbuild.builder.targets.exact import find_unknown_operators, find_unsteady_operators

        files = [*files]
        if unknown := sorted(find_unknown_operators(files)):
            return f"operators that nobody has probed: {', '.join(unknown)}"
        if unsteady := sorted(find_unsteady_operators(files)):
            return f"a row's place in memory changes its result: {', '.join(unsteady)}"
        return None

    def style(self, options: OnnxOptions, config: "ModelConfig") -> GraphStyle:
        dtype = cast("CacheType", options.cache_dtype)
        return GraphStyle(
            pipeline=PORTABLE if options.portable else CPU,
            formats=() if options.portable else self.formats,
            rounds_to=None if options.portable else "int8",
            cache_dtype=None if dtype == "float32" else dtype,
        )

    def check_model(self, model: "OpenedModel", plan: "Plan") -> None:
        """Refuse smaller caches in an engine whose products are in fp32, or without its kernels."""
        from mtpbuild.builder.plan.plan import check_cache_rows

        if (dtype := plan.style.cache_dtype) is None:
            return
        if not model.may_narrow_caches:
            raise UsageError(
                f"--cache-dtype {dtype} is for engines of int8 or int4 weights: "
                f"{model.source.name} would be one of {model.weights_type}"
            )
        check_cache_rows(plan.config, dtype)


TARGET = OnnxRuntime()
