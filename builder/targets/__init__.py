"""The targets: a folder each, with its flags and checks, without torch, and its lowering."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module

from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.contract.target_options import make_options
from mtpbuild.runtime.contract.targets import find_target, target_names


def load_target(name: str) -> Target:
    """Return the target of this name; raise UsageError, which lists all targets, for others."""
    builder = find_target(name).builder
    if isinstance(builder, str):
        builder = import_module(builder).TARGET
    assert isinstance(builder, Target), f"{name} has no builder"
    return builder


def load_flags(name: str) -> type[Target]:
    """Return the class of the target of this name, whose fields are its flags."""
    return type(load_target(name))


def configure_target(name: str, flags: Mapping[str, object]) -> Target:
    """Return a target with these values of its flags; raise UsageError for another's flag."""
    return make_options(name, flags, load_flags, flags=True)


def load_all_targets() -> Iterator[Target]:
    return map(load_target, target_names())


def list_target_names(can: Callable[[Target], bool]) -> str:
    """List the names of the targets for which `can` is true, for an error message."""
    return ", ".join(target.name for target in load_all_targets() if can(target))
