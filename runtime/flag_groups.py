"""Flags that several commands share: a dataclass per group, a field per flag."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a Typer command take groups: it gets a dataclass, its command line that one's fields.

    Every field is `name: Annotated[type, typer.Option(...)] = default`.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {p.name: p.annotation for p in signature.parameters.values() if _is_group(p)}

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        made = {}
        for name, group in groups.items():
            made[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given, **made)

    parameters = [p for p in signature.parameters.values() if p.name not in groups]
    for group in groups.values():
        parameters += _parameters(group)
    by_name = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapped.__signature__ = signature.replace(parameters=by_name)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in by_name}
    return wrapped


def _is_group(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    assert all(field.default is not MISSING for field in fields(group)), "flags have defaults"
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
