"""What several commands share: flags, numbers of drafts, and what is shown meanwhile and after."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, make_dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import typer

from mtpbuild.builder.targets import all_targets
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import flag, parse_list
from mtpbuild.runtime.ranks import Ranks

if TYPE_CHECKING:
    from mtpbuild.builder.plan import Nextn


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """How many ranks share a model, and how."""

    tp: int = flag(1, "Ranks that share the model.")
    ep: int = flag(1, "Groups of these ranks with routed experts of their own.")
    attention_dp: bool = flag(
        False, "Ranks share the routed experts alone; each has requests of its own."
    )

    def ranks(self) -> Ranks:
        return Ranks(self.tp, self.ep, self.attention_dp)


def make_target_flags() -> type[Any]:
    """A group of every target's options; each target has its own panel in the help.

    An option of several targets is in the panel of the first, with what all of them say of it.
    """
    found: dict[str, tuple[str, Any, Any]] = {}
    for target in all_targets():
        hints, panel = get_type_hints(target.Options), {"panel": f"Target {target.name}"}
        for option in fields(target.Options):
            said = option.metadata | panel
            if option.name in found:
                first = found[option.name][2].metadata
                both = f"{first['help']} Target {target.name}: {option.metadata['help']}"
                said = first | {"help": both}
            shown = field(default=option.default, metadata=said)
            found[option.name] = option.name, hints[option.name], shown
    return make_dataclass("TargetFlags", found.values(), frozen=True, kw_only=True)


def said(flags: Any) -> dict[str, Any]:
    """Those flags of a group that differ from their defaults."""
    pairs = ((option, getattr(flags, option.name)) for option in fields(flags))
    return {option.name: value for option, value in pairs if value != option.default}


def parse_nextn(text: str) -> tuple["Nextn", ...]:
    """Read what `build` and `bench` take: `0,1,auto` -> (0, 1, "auto")."""

    def read(part: str) -> "Nextn":
        return "auto" if part.strip() == "auto" else int(part)

    return parse_list("--nextn", text, read, "0,1,2,3, or auto")


def parse_range(text: str) -> tuple[int, ...]:
    """Read what `plan` takes: `3`, `0,1,3` or `0..5`, in rising order."""
    first, dots, last = text.partition("..")
    numbers = parse_list("--nextn", f"{first},{last}" if dots else text, int, "0,1,2,3")
    if not dots:
        return tuple(sorted(set(numbers)))
    low, high = numbers
    if not 0 <= low <= high <= 99:
        raise UsageError(f"--nextn {text}: the range must rise from 0 or more")
    return tuple(range(low, high + 1))


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Names the current stage on a terminal's error output; give it each later one."""
    from rich.console import Console

    with Console(stderr=True).status(first) as status:
        yield status.update


def show_results(path: Path, json: bool, show: Callable[[], None], pictures: str) -> None:
    """Print the JSON file that was written, or tables and where the file is."""
    if json:
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
    else:
        show()
        typer.echo(f"wrote {path} and its {pictures}")


def show(json: bool, document: Any, print_tables: Callable[[], None]) -> None:
    """Print one JSON object, or tables."""
    if json:
        typer.echo(dumps(document, indent=1))
    else:
        print_tables()
