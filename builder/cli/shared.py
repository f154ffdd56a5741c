"""Helpers of several commands: flags, numbers of drafts, progress and results."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mtpbuild.builder.targets import load_flags
from mtpbuild.runtime.checks import parse_list
from mtpbuild.runtime.contract.target_options import OptionFlags, make_option_flags
from mtpbuild.runtime.errors import UsageError

if TYPE_CHECKING:
    from mtpbuild.builder.plan.plan import Nextn
    from mtpbuild.lab.show.pictures import Picture

    TargetFlags = OptionFlags
else:
    TargetFlags = make_option_flags(load_flags)


def parse_nextn(text: str) -> tuple["Nextn", ...]:
    """Parse the --nextn of `build` and `bench`: `0,1,auto` -> (0, 1, "auto")."""

    def read(part: str) -> "Nextn":
        return "auto" if part.strip() == "auto" else int(part)

    return parse_list("--nextn", text, read, "0,1,2,3, or auto")


def parse_range(text: str) -> tuple[int, ...]:
    """Parse the --nextn of `plan`, `3`, `0,1,3` or `0..5`; return numbers in rising order."""
    first, dots, last = text.partition("..")
    numbers = parse_list("--nextn", f"{first},{last}" if dots else text, int, "0,1,2,3")
    if not dots:
        return tuple(sorted(set(numbers)))
    low, high = numbers
    if not 0 <= low <= high <= 99:
        raise UsageError(f"--nextn {text}: the range must rise from 0 or more")
    return tuple(range(low, high + 1))


@contextmanager
def show_progress(first: str = "") -> Iterator[Callable[[str], None]]:
    """Show the current stage on standard error; yield a function that changes it.

    A terminal shows it with the seconds since the command began, without a `first` stage from the
    second one on. Elsewhere each stage after the first one is a line.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield StageLines()
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
    task = progress.add_task(first, total=None)

    def show(stage: str) -> None:
        progress.start()
        progress.update(task, description=stage)

    try:
        if first:
            progress.start()
        yield show
    finally:
        progress.stop()


class StageLines:
    """Progress as lines: one per stage; a stage that counts prints one every `EVERY` seconds."""

    EVERY = 30.0

    def __init__(self) -> None:
        self._start = self._printed = time.monotonic()
        self._last = ""

    def __call__(self, stage: str) -> None:
        now, name = time.monotonic(), re.sub(r"\d+", "", stage.partition(",")[0])
        if name != self._last or now - self._printed >= self.EVERY:
            self._last, self._printed = name, now
            typer.echo(f"[{now - self._start:.0f} s] {stage}", err=True)


def print_written_results(
    path: Path, json: bool, print_tables: Callable[[], None], pictures: Mapping[str, "Picture"]
) -> None:
    """Print the JSON file that was written, or tables; then draw pictures beside the file.

    A picture that can't be drawn is a line on standard error.
    """
    from mtpbuild.lab.show.results import draw_pictures

    if json:
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
    else:
        print_tables()
    problems = draw_pictures(path.parent, pictures)
    if not json:
        typer.echo(f"wrote {path}" if problems else f"wrote {path} and its pictures")
    for problem in problems:
        typer.echo(f"note: {problem}", err=True)


def print_result(json: bool, document: Any, print_tables: Callable[[], None]) -> None:
    """Print one JSON object, or tables."""
    if json:
        typer.echo(dumps(document, indent=1))
    else:
        print_tables()
