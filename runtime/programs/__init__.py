"""Loads the programs of an engine: those of its target, and for ranks what leads or follows."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Programs
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.targets import find_target, names


def load_programs(
    folder: Path,
    manifest: Manifest,
    *,
    threads: int | None = None,
    provider: str | None = None,
    no_cuda_graphs: bool = False,
) -> Programs:
    """Load the programs of an engine that was checked; of one that ranks share, rank 0's.

    threads: None lets the target choose. provider: where to compute, for a target that has several;
    None lets it choose. no_cuda_graphs: launch a step kernel by kernel, for a target that can.
    """
    options = {"provider": provider, "no_cuda_graphs": no_cuda_graphs or None}
    load = _loader(folder, manifest, threads=threads, **options)
    if not manifest.split:
        return load(folder, manifest)
    with find_target(manifest.target.name).importing():
        from mtpbuild.runtime.group.lead import lead  # with torch.distributed

    return lead(folder, manifest, load)


def follow_programs(folder: Path, manifest: Manifest, threads: int | None = None) -> None:
    """Load another rank's programs and let them do what rank 0's do, until it ends."""
    load = _loader(folder, manifest, threads=threads)
    with find_target(manifest.target.name).importing():
        from mtpbuild.runtime.group.lead import follow

    follow(folder, manifest, load)


def _loader(
    folder: Path, manifest: Manifest, *, threads: int | None, **options: Any
) -> Callable[..., Programs]:
    """The target's `load`, with the options that were given; refuses those that it lacks."""
    target = find_target(manifest.target.name)
    given = {name: value for name, value in options.items() if value is not None}
    for option, value in given.items():
        if option not in target.load_options:
            have = [name for name in names() if option in find_target(name).load_options]
            said = f"--{option.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise UsageError(
                f"{said} is for target {' or '.join(have)}; {folder} is for target {target.name}"
            )
    with target.importing():
        load = import_module(target.programs).load
    return partial(load, threads=threads, **given)
