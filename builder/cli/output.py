"""Shows what a command is doing, and the results that it has written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


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
