"""Flags that several commands share: a dataclass per group, a field per flag; lists in a flag."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from typer import Option

from mtpbuild.runtime.errors import UsageError

T = TypeVar("T")


def flag(default: T, help: str, *names: str) -> T:
    """A field of a group; names: what the command line calls it, if not as the field."""
    return field(default=default, metadata={"help": help, "names": names})


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a Typer command take groups: it gets a dataclass, its command line that one's fields.

    Every field is `name: type = flag(default, help)`.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {p.name: p.annotation for p in signature.parameters.values() if _is_group(p)}

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    parameters = [p for p in signature.parameters.values() if p.name not in groups]
    for group in groups.values():
        parameters += _parameters(group)
    by_name = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapped.__signature__ = signature.replace(parameters=by_name)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in by_name}
    return wrapped


def parse_list(flag: str, text: str, kind: Callable[[str], T], example: str) -> tuple[T, ...]:
    """Read `0,1,2` as numbers of a kind; raises UsageError that shows an example."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} {text!r} is not a list of numbers such as {example}") from None


def _parameters(group: type[Any]) -> Iterator[inspect.Parameter]:
    """What the command line takes for a group; a switch has no opposite."""
    hints, parameters = get_type_hints(group), inspect.signature(group).parameters
    for entry in fields(group):
        said, name = entry.metadata, entry.name.replace("_", "-")
        names = said["names"] or (f"--{name}",)
        option = Option(*names, help=said["help"], rich_help_panel=said.get("panel"))
        yield parameters[entry.name].replace(annotation=Annotated[hints[entry.name], option])


def _is_group(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)
