"""A target as another package would bring it: an entry point that names `TOY`, and a file a side.

This module is imported by each command that has flags of targets, so it imports no torch.
"""

from dataclasses import dataclass
from pathlib import Path

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.flag_groups import flag
from mtpbuild.runtime.targets import TargetRecord


@dataclass(frozen=True)
class ToyLoadOptions:
    """The flags that `run`, `serve` and others have where this target is installed."""

    toy_log: Path | None = flag(None, "File that gets a line for each program that runs.")


TOY = TargetRecord(
    name="toy",
    programs=f"{__name__}.programs",
    builder=f"{__name__}.build",
    LoadOptions=ToyLoadOptions,
    build_flags=lambda manifest: {"toy_mark": manifest.target.versions["mark"]},
    features={Feature.KEEP: "", Feature.CONSTRAIN: "", Feature.PENALISE: ""},
)
