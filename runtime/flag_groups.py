"""Flags of commands: a field `name: type = flag(default, help)` declares one, of its name.

A group of flags, which commands share, is a dataclass of such fields. Its `PANEL` is the heading
under which the help shows them, unless a flag names another one.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import Field, field, fields, is_dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

if TYPE_CHECKING:
    from typer import Context

T = TypeVar("T")


def flag(
    default: T,
    help: str,
    *names: str,
    panel: str = "",
    parser: Callable[[str], T] | None = None,
) -> T:
    """Return a default value that makes a field, or a command's parameter, a flag.

    names: the flag's names, if they differ from the field's. A switch has no opposite. panel: the
    heading in the help. parser: reads the flag's value, if the field's type is not enough.
    """
    metadata = {"help": help, "names": names, "panel": panel, "parser": parser}
    return field(default=default, metadata=metadata)


model_flag = partial(flag, panel="Model")
drafts_flag = partial(flag, panel="Drafts")
engine_flag = partial(flag, panel="Engine")
output_flag = partial(flag, panel="Output")


def make_context_flag() -> int | None:
    """Return the default value of a field that is `--max-seq-len` of a command that loads one."""
    text = "Prompt and output tokens of a request together, at most the engine's."
    return engine_flag(None, text)


def name_flag(name: str) -> str:
    """Return a field's name as a flag."""
    return "--" + name.replace("_", "-")


def group_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Let a Typer command take `name: type = flag(default, help)`, and groups of such fields.

    The command receives each group as an instance of its dataclass.
    """
    signature = inspect.signature(command, eval_str=True)
    groups, shown = dict[str, type[Any]](), list[inspect.Parameter]()
    for parameter in signature.parameters.values():
        kind, default = parameter.annotation, parameter.default
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            hints, panel = get_type_hints(kind), getattr(kind, "PANEL", "")
            shown += [_make_parameter(f.name, hints[f.name], f, panel) for f in fields(kind)]
        elif isinstance(default, Field):
            shown.append(_make_parameter(parameter.name, kind, default))
        else:
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def wrapped(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    wrapped.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in shown}
    return wrapped


def find_given_flags(context: "Context", names: Iterable[str]) -> list[str]:
    """Return those of these parameters whose flags stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def _make_parameter(
    name: str, kind: Any, entry: "Field[Any]", panel: str = ""
) -> inspect.Parameter:
    """Return the parameter that Typer turns into an option."""
    from typer import Option  # here, so that loading an engine does not import Typer

    declared = entry.metadata
    option = Option(
        *(declared["names"] or (name_flag(name),)),
        help=declared["help"],
        rich_help_panel=declared["panel"] or panel or None,
        parser=declared["parser"],
    )
    keyword, kind = inspect.Parameter.KEYWORD_ONLY, Annotated[kind, option]
    return inspect.Parameter(name, keyword, default=entry.default, annotation=kind)
