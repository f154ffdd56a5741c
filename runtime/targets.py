"""Targets by name: a small record says which modules build and run a target's engines.

`register` adds one. A package adds its own without being imported, by an entry point of the group
`mtpbuild.targets` that names a `Target`; entry points are only looked at for a name that isn't
registered, or for a list of all names.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.errors import MissingDependencyError, UsageError

GROUP = "mtpbuild.targets"


@dataclass(frozen=True)
class Target:
    """A target, as far as it is known before anything of it is imported.

    programs: module with `load(folder, manifest, threads, **options)`, which gives an engine's
    programs. lowering: module whose `TARGET` builds them, or that object itself. install: what to
    do where a package is missing that `programs` imports. load_options: what `load` takes besides;
    for an engine that ranks share it also takes `channel`. rank_flags: those of a build's flags
    that a command repeats to build one rank more, if they are the target's own. features: what its
    engines can do, each with the condition for it in words, such as "on a CPU" ("": always).
    """

    name: str
    programs: str
    lowering: object
    install: str = ""
    load_options: tuple[str, ...] = ()
    rank_flags: tuple[str, ...] = ()
    features: Mapping[Feature, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Say how to install what an import in the block finds missing."""
        try:
            yield
        except ImportError as error:
            if not self.install:
                raise
            need = f"this engine needs {error.name}: {self.install}"
            raise MissingDependencyError(need) from error


RUN, BUILD, INSTALL = "mtpbuild.runtime.programs.", "mtpbuild.builder.targets.", "pip install "
ONNXRUNTIME = f"{INSTALL}'mtpbuild[cpu]' (or 'mtpbuild[cuda]')"
BUILT_IN = (
    Target(
        *("onnxruntime", f"{RUN}onnxruntime", f"{BUILD}onnxruntime", ONNXRUNTIME),
        load_options=("provider",),
        features={
            Feature.KEEP: "",
            Feature.ADAPT: "",
            Feature.CONSTRAIN: "",
            Feature.PENALISE: "",
        },
    ),
    Target(
        *("inductor", f"{RUN}inductor", f"{BUILD}inductor", f"{INSTALL}'mtpbuild[inductor]'"),
        load_options=("no_cuda_graphs",),
        rank_flags=("device", "dtype"),
        features={
            Feature.KEEP: "",
            Feature.OVERLAP: "on a GPU",
            Feature.CONSTRAIN: "on a CPU with one rank",
            Feature.PENALISE: "on a CPU",
            Feature.SHARE: "with several ranks",
        },
    ),
    Target(
        *(
            "tensorrt",
            f"{RUN}tensorrt",
            f"{BUILD}tensorrt",
            f"{INSTALL}torch (one for CPUs will do)",
        ),
        rank_flags=("dtype",),
        features={Feature.KEEP: "", Feature.SHARE: "with several ranks"},
    ),
    Target(
        *("tensorrt-rtx", f"{RUN}tensorrt", f"{BUILD}tensorrt_rtx"), features={Feature.KEEP: ""}
    ),
)
_registered = {target.name: target for target in BUILT_IN}


def register(target: Target) -> None:
    """Make a target known; it takes the place of another one of that name."""
    _registered[target.name] = target


def find_target(name: str) -> Target:
    """The target of that name; raises UsageError that lists the known ones."""
    if name in _registered:
        return _registered[name]
    for entry in entry_points(group=GROUP, name=name):
        target: Target = entry.load()
        return target
    raise UsageError(f"unknown target {name!r}; supported: {', '.join(names())}")


def names() -> tuple[str, ...]:
    """All that can be found, those of this package first."""
    return (*dict.fromkeys((*_registered, *entry_points(group=GROUP).names)),)


def targets_with(feature: Feature) -> str:
    """Name the targets whose engines have a feature, for a refusal."""
    found = (find_target(name) for name in names())
    having = (t for t in found if feature in t.features)
    return " or ".join(f"{target.name} {target.features[feature]}".strip() for target in having)
