"""Groups of flags that commands share: a group is a dataclass, and each field is a flag."""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import Field, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

if TYPE_CHECKING:
    from typer import Context

T = TypeVar("T")
# --max-seq-len of commands that load an engine
MAX_SEQ_LEN = "Prompt and output tokens of a request together, at most the engine's."


def flag(default: T, help: str, *names: str, parser: Callable[[str], T] | None = None) -> T:
    """Return a default value that makes a field, or a command's parameter, a flag.

    names: the flag's names, if they differ from the field's. A switch has no opposite. parser:
    reads the flag's value, if the field's type is not enough.
    """
    return field(default=default, metadata={"help": help, "names": names, "parser": parser})


def group_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Let a Typer command take `name: type = flag(default, help)`, and groups of such fields.

    The command receives each group as an instance of its dataclass.
    """
    signature, shown = inspect.signature(command, eval_str=True), list[inspect.Parameter]()
    groups = dict[str, type[Any]]()
    for parameter in signature.parameters.values():
        kind, default = parameter.annotation, parameter.default
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
        elif isinstance(default, Field):
            shown.append(_make_parameter(parameter.name, kind, default))
        else:
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    for group in groups.values():
        hints = get_type_hints(group)
        shown += [_make_parameter(entry.name, hints[entry.name], entry) for entry in fields(group)]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    wrapped.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in shown}
    return wrapped


def find_given_flags(context: "Context", names: Iterable[str]) -> list[str]:
    """Return those of these parameters whose flags stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def _make_parameter(name: str, kind: Any, entry: "Field[Any]") -> inspect.Parameter:
    """Return the parameter that Typer turns into an option."""
    from typer import Option  # here, so that loading an engine does not import Typer

    metadata, keyword = entry.metadata, inspect.Parameter.KEYWORD_ONLY
    names = metadata["names"] or (f"--{name.replace('_', '-')}",)
    panel, parser = metadata.get("panel"), metadata.get("parser")
    option = Option(*names, help=metadata["help"], rich_help_panel=panel, parser=parser)
    kind = Annotated[kind, option]
    return inspect.Parameter(name, keyword, default=entry.default, annotation=kind)
