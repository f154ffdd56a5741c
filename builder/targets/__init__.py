"""The targets: each has a module for options and checks, without torch, and one for lowering."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.contract.targets import find_target, target_names


def load_target(name: str) -> Target:
    """Return the target of this name; raise UsageError, which lists all targets, for others."""
    builder = find_target(name).builder
    if isinstance(builder, str):
        builder = import_module(builder).TARGET
    assert isinstance(builder, Target), f"{name} has no builder"
    return builder


def load_all_targets() -> Iterator[Target]:
    return map(load_target, target_names())


def list_target_names(can: Callable[[Target], bool]) -> str:
    """List the names of the targets for which `can` is true, for an error message."""
    return ", ".join(target.name for target in load_all_targets() if can(target))


def build_options(target: str) -> type[Any]:
    """Return the class of a target's build options."""
    return load_target(target).Options
