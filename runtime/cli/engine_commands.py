"""The commands `list` and `rm`, and the question that commands ask before they change much."""

import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from mtpbuild.runtime.cli.commands import error_line
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import flag, group_flags


@error_line
@group_flags
def list_engines(json: bool = flag(False, "One JSON object per engine.")) -> None:
    """List the engines under engines/: model, drafts, weights, size, context and last use."""
    from mtpbuild.runtime.cli import engines

    found = [engines.describe_engine(folder) for folder in engines.list_folders()]
    if json:
        for engine in found:
            typer.echo(dumps(asdict(engine)))
    elif found:
        engines.print_engine_list(found)
    else:
        where = engines.ENGINES.absolute()
        typer.echo(f"no engine in {where}: `mtpbuild run MODEL` makes one", err=True)


@error_line
@group_flags
def remove_engine(
    name: Annotated[Path, Argument(help="Name under engines/, or an engine's folder.")],
    yes: bool = flag(False, "Do not ask."),
) -> None:
    """Remove an engine."""
    from mtpbuild.runtime.cli import engines

    folder = engines.find_removable(name)
    if confirm(f"remove {folder}?", yes=yes):
        left = ", ".join(engines.remove_folder(folder))
        rest = f"; what is not the engine's stays there: {left}" if left else ""
        typer.echo(f"removed {folder}{rest}", err=True)


def confirm(question: str, *, yes: bool) -> bool:
    """Ask on the terminal; raise UsageError if there is none and `--yes` was not given."""
    if yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{question} There is no terminal to ask on: add --yes")
    return typer.confirm(question, default=False, err=True)
