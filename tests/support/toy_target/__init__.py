"""A target as in another package: an entry point that names `TOY`, and a file for each side.

Each command that has flags of targets imports this module, so it must not import torch.
"""

from dataclasses import dataclass
from pathlib import Path

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.targets import TargetRecord
from mtpbuild.runtime.flag_groups import flag


@dataclass(frozen=True)
class ToyLoadOptions:
    """The flags that `run`, `serve` and others get from this target."""

    toy_log: Path | None = flag(None, "File that gets a line for each program that runs.")


TOY = TargetRecord(
    name="toy",
    programs=f"{__name__}.programs",
    builder=f"{__name__}.build",
    LoadOptions=ToyLoadOptions,
    build_flags=lambda manifest: {"toy_mark": manifest.target.versions["mark"]},
    features={Feature.PREFIX_CACHE: "", Feature.CONSTRAIN: "", Feature.PENALISE: ""},
)
