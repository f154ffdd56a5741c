"""Flags that several commands share: a dataclass per group, a field per flag; lists in a flag."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from mtpbuild.runtime.errors import UsageError

T = TypeVar("T")


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a Typer command take groups: it gets a dataclass, its command line that one's fields.

    Every field is `name: Annotated[type, Option(...)] = default`.
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
        parameters += inspect.signature(group, eval_str=True).parameters.values()
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


def _is_group(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)
