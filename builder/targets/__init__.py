"""The targets: one torch-free file each for its options and checks, one for its lowering."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.targets import find_target, names


def load_target(name: str) -> Target:
    """Raises UsageError that lists the targets if there is no such one."""
    lowering = find_target(name).lowering
    if isinstance(lowering, str):
        lowering = import_module(lowering).TARGET
    assert isinstance(lowering, Target), f"{name} has no builder"
    return lowering


def all_targets() -> Iterator[Target]:
    return map(load_target, names())


def targets_that(can: Callable[[Target], bool]) -> str:
    """Names of the targets that can do something, for a refusal."""
    return ", ".join(target.name for target in all_targets() if can(target))


def make_options(target: Target, flags: Mapping[str, Any]) -> Any:
    """A target's options; raises UsageError for a flag that only others have."""
    for flag, value in flags.items():
        if flag not in flags_of(target):
            owners = targets_that(lambda other, flag=flag: flag in flags_of(other))  # type: ignore[misc]
            said = f"--{flag.replace('_', '-')}" + ("" if value is True else f" {value}")
            if not owners:
                raise UsageError(f"{said}: no target has this option")
            raise UsageError(f"{said} is for target {owners}, not {target.name}")
    return target.Options(**flags)


def flags_of(target: Target) -> set[str]:
    return {field.name for field in fields(target.Options)}
