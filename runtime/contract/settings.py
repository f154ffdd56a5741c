"""The declarations of a request's settings and of a step's controls, as metadata of fields.

`setting` says how users give a field: range, flag, presence in HTTP bodies, treatment by `diff`.
`control` makes a field an input of the mixed program. Flags, HTTP fields, lines of input files,
notes of a trace and the programs' inputs are derived from them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, TypeVar

from mtpbuild.runtime.checks import Check

T = TypeVar("T")
MAX_LOGPROBS = 20  # alternatives per token; OpenAI's API has the same limit
MAX_BIASES = 300  # tokens that a request may bias; OpenAI's API has the same limit


@dataclass(frozen=True, slots=True)
class Setting:
    """The flag of a setting, its checks, and where users may give it.

    check: returns the value to store; its ValueError says what the value must be. help: of the
    flag; a setting without help has no flag. panel: the flag's heading in the help. everywhere:
    whether bench and eval have the flag besides run. parse: turns the flag's name and text into a
    value, if the text is not the value itself. http: whether HTTP bodies and lines of input files
    have the setting. differs: how `diff` treats two traces that differ in it: it refuses them,
    notes it, or ("") ignores it. tokens: whether its values are token ids, which must be in the
    engine's vocabulary.
    """

    check: Check
    help: str = ""
    panel: str = "Sampling"
    everywhere: bool = False
    parse: Callable[[str, str], Any] | None = None
    http: bool = True
    differs: Literal["refused", "noted", ""] = ""
    tokens: bool = False


@dataclass(frozen=True, slots=True)
class Control:
    """An input of the mixed program, [B, *shape]; strings in `shape` name sizes of the engine."""

    dtype: Literal["float32", "int64", "int32", "bool"]
    shape: tuple[int | str, ...] = ()
    core: bool = True  # in every mixed program; False: only in programs with penalties
    setting: str = ""  # the user's name for it; by default the field's name
    needs: tuple[str, ...] = ()  # without effect while all these fields have their defaults
    name: str = ""  # the field's name, filled in by `list_settings_controls`


def setting(
    default: T, check: Check, help: str = "", *, control: Control | None = None, **more: Any
) -> T:
    """Return a default value that makes a dataclass's field a `Setting`, and perhaps a `Control`.

    more: the other fields of `Setting`.
    """
    metadata = {Setting: Setting(check, help, **more), Control: control}
    return field(default=default, metadata=metadata)


def control(default: T, dtype: Any, shape: tuple[int | str, ...] = (), **more: Any) -> T:
    """Return a default value that makes a dataclass's field a `Control`."""
    return field(default=default, metadata={Control: Control(dtype, shape, **more)})


shaping = partial(setting, everywhere=True, differs="refused")  # shapes the distribution
penalty = partial(setting, differs="refused")
noted = partial(setting, differs="noted")
judging = partial(
    setting, everywhere=True, differs="noted", panel="Drafts"
)  # decides how drafts are accepted
private = partial(setting, http=False)  # not a field of HTTP bodies or input files


def declarations(kind: type[Any], wanted: type[T]) -> dict[str, T]:
    """Return the settings, or the controls, that a dataclass's fields declare, by name."""
    return {f.name: f.metadata[wanted] for f in fields(kind) if f.metadata.get(wanted)}


def list_settings_controls(kind: type[Any]) -> tuple[Control, ...]:
    """Return a dataclass's fields that are inputs of the mixed program, in their order."""
    return tuple(
        replace(control, name=name, setting=control.setting or name)
        for name, control in declarations(kind, Control).items()
    )
