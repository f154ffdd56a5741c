"""Runs the runtime's own commands in the test's process, on a terminal if needed."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

import typer
from typer.testing import CliRunner, Result

from mtpbuild.runtime import cli

app = typer.Typer()
app.command("run")(cli.run)
app.command("inspect")(cli.inspect)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TerminalRunner(CliRunner):
    """Lets a command read from a terminal, where the usual runner's standard input is a file."""

    @contextlib.contextmanager
    def isolation(self, input: Any = None, *rest: Any, **options: Any) -> Iterator[Any]:
        with super().isolation(None, *rest, **options) as streams:
            sys.stdin = Terminal(input)  # the runner restores the real one
            yield streams


def call(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def type_in(lines: list[str], *args: object) -> Result:
    """Runs a command on a terminal; types these lines, then Ctrl-D."""
    said = "".join(f"{line}\n" for line in lines)
    return TerminalRunner().invoke(app, [str(arg) for arg in args], input=said)
