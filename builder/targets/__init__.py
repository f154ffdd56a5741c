"""The targets: one torch-free file each for its options and checks, one for its lowering."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.targets import find_target, names


def load_target(name: str) -> Target:
    """Raises UsageError that lists the targets if there is no such one."""
    builder = find_target(name).builder
    if isinstance(builder, str):
        builder = import_module(builder).TARGET
    assert isinstance(builder, Target), f"{name} has no builder"
    return builder


def all_targets() -> Iterator[Target]:
    return map(load_target, names())


def targets_that(can: Callable[[Target], bool]) -> str:
    """Names of the targets that can do something, for a refusal."""
    return ", ".join(target.name for target in all_targets() if can(target))


def build_options(target: str) -> type[Any]:
    """A target's options when an engine is built."""
    return load_target(target).Options
