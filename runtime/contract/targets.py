"""The registry of targets: a small record names the modules that build and run a target's engines.

A package adds a target by an entry point of the group `mtpbuild.targets`, a `TargetRecord`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.registry import Registry
from mtpbuild.runtime.errors import advise_install, explain_missing_package
from mtpbuild.runtime.flag_groups import flag

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class NoOptions:
    """The options of a target that has none."""


@dataclass(frozen=True)
class TargetRecord:
    """The properties of a target that are known before its modules are imported; it needs no torch.

    programs: the module that runs its engines. Its `load(folder, manifest, threads)` returns an
    engine's programs. It also takes each field of `LoadOptions` by name, and `channel` for an
    engine of several ranks.

    builder: the module whose `TARGET` builds its engines, or that object itself.

    install: advice for users if a package that `programs` imports is missing.

    LoadOptions: a frozen dataclass of `flag`s, the options for loading an engine. The commands that
    load engines have these flags.

    build_flags: returns the target's own flags of `mtpbuild build` for another engine of a
    manifest's kind: another rank, or the same model without drafts. The manifest is an `Any`, since
    its module imports this one.

    features: the features of its engines, each with a condition for messages, such as "on a CPU";
    "" if there is none.
    """

    name: str
    programs: str
    builder: object
    install: str = ""
    LoadOptions: "type[DataclassInstance]" = NoOptions
    build_flags: Callable[[Any], Mapping[str, Any]] = lambda manifest: {}
    features: Mapping[Feature, str] = field(default_factory=dict)

    def importing(self) -> AbstractContextManager[None]:
        """Turn an ImportError in the block into advice on what to install."""
        return explain_missing_package("this engine", install=self.install)


@dataclass(frozen=True)
class OnnxLoadOptions:
    provider: str | None = flag(None, "Where onnxruntime computes: cpu (default) or cuda.")
    huge_pages: bool = flag(False, "Copy the weights into memory of huge pages, on Linux.")


@dataclass(frozen=True)
class InductorLoadOptions:
    no_cuda_graphs: bool = flag(False, "On GPUs, launch steps kernel by kernel.")


def _join_architectures(manifest: Any) -> str:
    """Return an engine's compute capabilities as the value of a flag: sm89,sm120."""
    return ",".join(f"sm{name.replace('.', '')}" for name in manifest.target.compute_capabilities)


def _make_onnx_flags(manifest: Any) -> Mapping[str, Any]:
    flags: dict[str, object] = {}
    if cache_dtypes := {s.dtype for s in manifest.state if s.role == "rows"} - {"float32"}:
        (flags["cache_dtype"],) = cache_dtypes
    if manifest.build.cpu_layout is None:
        flags["portable"] = True
    return flags


def _make_inductor_flags(manifest: Any) -> Mapping[str, Any]:
    target, flags = manifest.target, dict[str, str]()
    if target.compute_capabilities:
        flags["device"] = "cuda"
    flags["dtype"] = manifest.build.dtype
    if target.cross_compiled is not None:
        flags["compute_capability"] = _join_architectures(manifest)
    if target.allreduce_strategy is not None:
        flags["allreduce_strategy"] = target.allreduce_strategy
    return flags


RUN, BUILD = "mtpbuild.runtime.programs.", "mtpbuild.builder.targets."
BUILT_IN = (
    TargetRecord(
        name="onnxruntime",
        programs=f"{RUN}onnxruntime",
        builder=f"{BUILD}onnxruntime",
        install=f"{advise_install('cpu')} (or [onnxruntime-gpu])",
        LoadOptions=OnnxLoadOptions,
        build_flags=_make_onnx_flags,
        features=dict.fromkeys({*Feature} - {Feature.OVERLAP, Feature.SHARE}, ""),
    ),
    TargetRecord(
        name="inductor",
        programs=f"{RUN}inductor",
        builder=f"{BUILD}inductor",
        install=advise_install("inductor"),
        LoadOptions=InductorLoadOptions,
        build_flags=_make_inductor_flags,
        features={
            Feature.PREFIX_CACHE: "without attention-DP",
            Feature.OVERLAP: "on a GPU",
            Feature.CONSTRAIN: "on a CPU with one rank",
            Feature.PENALISE: "on a CPU",
            Feature.SCORE: "on a CPU with one rank",
            Feature.SHARE: "with several ranks",
        },
    ),
    TargetRecord(
        name="tensorrt",
        programs=f"{RUN}tensorrt",
        builder=f"{BUILD}tensorrt",
        install="pip install torch (one for CPUs will do)",
        build_flags=lambda manifest: {"dtype": manifest.build.dtype},
        features={
            Feature.PREFIX_CACHE: "without attention-DP",
            Feature.SHARE: "with several ranks",
        },
    ),
    TargetRecord(
        name="tensorrt-rtx",
        programs=f"{RUN}tensorrt",
        builder=f"{BUILD}tensorrt_rtx",
        build_flags=lambda manifest: {"compute_capability": _join_architectures(manifest)},
        features={Feature.PREFIX_CACHE: ""},
    ),
)
_targets = Registry[TargetRecord]("target", "mtpbuild.targets", BUILT_IN)
register, find_target, target_names = _targets.register, _targets.find, _targets.names


def list_targets_with(feature: Feature) -> str:
    """Return the targets whose engines have a feature, with conditions, for an error message."""
    targets = (target for target in _targets.all() if feature in target.features)
    return " or ".join(f"{target.name} {target.features[feature]}".strip() for target in targets)
