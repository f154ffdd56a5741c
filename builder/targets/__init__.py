"""The targets: each has a torch-free file for options and checks, and one that lowers programs."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.targets import find_target, names


def load_target(name: str) -> Target:
    """Returns the target of that name; raises UsageError, which lists all targets, without one."""
    builder = find_target(name).builder
    if isinstance(builder, str):
        builder = import_module(builder).TARGET
    assert isinstance(builder, Target), f"{name} has no builder"
    return builder


def all_targets() -> Iterator[Target]:
    return map(load_target, names())


def targets_that(can: Callable[[Target], bool]) -> str:
    """Lists the targets that can do something, for the message of a refusal."""
    return ", ".join(target.name for target in all_targets() if can(target))


def build_options(target: str) -> type[Any]:
    """Returns a target's options for building an engine."""
    return load_target(target).Options
