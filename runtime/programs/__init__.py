"""Loading of an engine's programs: those of its target, for one process or for ranks."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Programs
from mtpbuild.runtime.contract.target_options import load_options, make_options
from mtpbuild.runtime.contract.targets import find_target


def load_programs(
    folder: Path, manifest: Manifest, *, threads: int | None = None, **options: Any
) -> Programs:
    """Load the programs of a checked engine; rank 0's if several ranks share it.

    threads: None lets the target choose. options: load options of the engine's target; None and
    False mean that an option was not given. Raises UsageError for an option that the target lacks.
    """
    load = find_load(manifest, threads, options)
    if not manifest.split:
        return load(folder, manifest)
    with find_target(manifest.target.name).importing():
        from mtpbuild.runtime.group.lead import lead  # with torch.distributed

    return lead(folder, manifest, load)


def find_load(
    manifest: Manifest, threads: int | None, options: dict[str, Any]
) -> Callable[..., Programs]:
    """Return the target's `load`, with its options."""
    target = find_target(manifest.target.name)
    chosen_options = {name: value for name, value in options.items() if value not in (None, False)}
    chosen = make_options(target.name, chosen_options, load_options)
    with target.importing():
        load = import_module(target.programs).load
    return partial(load, threads=threads, **vars(chosen))
