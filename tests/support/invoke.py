"""Runs the compiler's commands in the test's own process."""

from collections.abc import Sequence
from pathlib import Path

import typer
from typer.testing import CliRunner

from mtpbuild.builder.cli import app


def invoke(*args: str | Path) -> tuple[int, str, str]:
    """Runs a command; returns its exit code, standard output and standard error."""
    done = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "300"})
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stdout, done.stderr


def options(command: str) -> list[str]:
    """Lists a command's flags, sorted."""
    group = typer.main.get_command(app)
    found: Sequence[typer.core.TyperOption] = group.commands[command].params  # type: ignore[attr-defined]
    names = [name for option in found for name in option.opts + option.secondary_opts]
    return sorted(name for name in names if name.startswith("-"))  # arguments have none
