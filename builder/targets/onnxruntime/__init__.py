"""Target onnxruntime, the default for embedding: ONNX graphs for any CPU, run without torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.targets.onnxruntime.pipeline import CPU, PORTABLE
from mtpbuild.builder.targets.target import ONNX_PACKAGES, Target
from mtpbuild.runtime.checks import check_one_of
from mtpbuild.runtime.cpu_library import REMEDY, find_library
from mtpbuild.runtime.errors import MissingDependencyError, UsageError
from mtpbuild.runtime.flag_groups import flag

if TYPE_CHECKING:
    from mtpbuild.builder.plan.plan import Plan
    from mtpbuild.builder.plan.request import BuildRequest
    from mtpbuild.builder.program.opened_model import OpenedModel
    from mtpbuild.builder.program.trace import TracedProgram
    from mtpbuild.builder.weights.placed import ByteRange
    from mtpbuild.runtime.contract.manifest import CacheType, TargetInfo

KEPT = ("int8", "int4", "mxfp4")  # formats whose weights engines keep
CACHE_DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class OnnxRuntime(Target):
    portable: bool = flag(
        False,
        "A graph of standard operators in fp32 for any onnxruntime, such as --provider cuda.",
    )
    cache_dtype: str = flag(
        "float32", "Type of caches: float32, or bfloat16 or int8 in engines of int8 or int4."
    )

    name = "onnxruntime"
    packages = ONNX_PACKAGES
    formats = ("int8", "int4")
    may_be_exact = True

    def info(self, plan: "Plan") -> "TargetInfo":
        from mtpbuild.builder.targets.onnxruntime import lowering

        return lowering.info()

    def lower(
        self, traced: "TracedProgram", weights: Mapping[str, "ByteRange"], folder: Path
    ) -> str:
        from mtpbuild.builder.targets.onnxruntime import lowering

        return lowering.lower(traced, weights, folder)

    @property
    def style(self) -> GraphStyle:
        cache_dtype = cast("CacheType", self.cache_dtype)
        return GraphStyle(
            pipeline=PORTABLE if self.portable else CPU,
            formats=() if self.portable else KEPT,
            rounds_to=None if self.portable else "int8",
            cache_dtype=None if cache_dtype == "float32" else cache_dtype,
        )

    def check(self, request: "BuildRequest") -> None:
        check_one_of(self.cache_dtype, CACHE_DTYPES, "--cache-dtype")
        if not self.portable:
            return
        weights = None if request.scheme is None else request.scheme.main
        for needed, is_given in (
            (f"--cache-dtype {self.cache_dtype}", self.cache_dtype != "float32"),
            (f"--weights {weights}", weights is not None),
        ):
            if is_given:
                raise UsageError(
                    f"--portable engines are fp32, so {needed} needs an engine without --portable"
                )
        if request.exact:
            raise UsageError(
                "--portable engines compute by onnxruntime's products, which are not exact, so "
                "--exact needs an engine without --portable"
            )

    def check_machine(self, plan: "Plan") -> None:
        """Raise MissingDependencyError if the library of CPU kernels is needed, but not built."""
        if plan.style.packs_weights and find_library() is None:
            raise MissingDependencyError(
                f"target {self.name}: the library of CPU kernels is not built here: {REMEDY}; "
                "or build with --portable, without them"
            )
        from mtpbuild.builder.targets.onnxruntime import lowering  # noqa: F401  # is all there?

    def explain_inexact(self, files: Iterable[Path]) -> str | None:
        from mtpbuild.builder.targets.onnxruntime.exact import (
            find_unknown_operators,
            find_unsteady_operators,
        )

        files = [*files]
        if unknown := sorted(find_unknown_operators(files)):
            return f"operators that nobody has probed: {', '.join(unknown)}"
        if unsteady := sorted(find_unsteady_operators(files)):
            return f"a row's place in memory changes its result: {', '.join(unsteady)}"
        return None

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
