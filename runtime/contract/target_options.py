"""The options of targets as flags and as values, for builds and for loading.

`options_of` maps a target's name to its options for one of the two, a frozen dataclass of `flag`s.
"""

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_type_hints

from mtpbuild.runtime.contract.targets import find_target, target_names
from mtpbuild.runtime.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
OptionValue: TypeAlias = str | bool | None


@dataclass(frozen=True, kw_only=True)
class OptionFlags:
    """The base of a group of flags that has a field for each option of every target."""


def load_options(target: str) -> "type[DataclassInstance]":
    """Return the class of a target's options for loading an engine."""
    return find_target(target).LoadOptions


def make_option_flags(options_of: "Callable[[str], type[DataclassInstance]]") -> type[OptionFlags]:
    """Return a group of every target's options; each target has its own panel in the help.

    An option of several targets is in the panel of the first, with the help texts of all of them.
    """
    flags: dict[str, tuple[str, Any, Field[Any]]] = {}
    for target in target_names():
        options = options_of(target)
        hints = get_type_hints(options)
        for option in fields(options):
            metadata = option.metadata | {"panel": f"Target {target}"}
            if option.name in flags:
                first = flags[option.name][2].metadata
                both = f"{first['help']} Target {target}: {option.metadata['help']}"
                metadata = first | {"help": both}
            entry: Field[Any] = field(default=option.default, metadata=metadata)
            flags[option.name] = option.name, hints[option.name], entry
    return make_dataclass(
        "TargetFlags", flags.values(), bases=(OptionFlags,), frozen=True, kw_only=True
    )


def list_changed_flags(flags: OptionFlags) -> dict[str, Any]:
    """Return the flags of a group that differ from their defaults."""
    pairs = ((option, getattr(flags, option.name)) for option in fields(flags))
    return {option.name: value for option, value in pairs if value != option.default}


def make_options(
    target: str,
    values: Mapping[str, object],
    options_of: Callable[[str], type[Options]],
    *,
    flags: bool = False,
) -> Options:
    """Return a target's options; raise UsageError for an option that the target does not have.

    flags: whether the caller gave them as flags of a command.
    """

    def has(other: str, option: str) -> bool:
        return option in {entry.name for entry in fields(options_of(other))}

    for option, value in values.items():
        if has(target, option):
            continue
        owners = ", ".join(other for other in target_names() if has(other, option))
        name = f"--{option.replace('_', '-')}" if flags else option
        option_text = name + ("" if value is True else f" {value}")
        if not owners:
            raise UsageError(f"{option_text}: no target has this option")
        raise UsageError(f"{option_text} is for target {owners}, not {target}")
    return options_of(target)(**values)
