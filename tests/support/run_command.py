"""The runtime's own commands, run in the test's process, as on a terminal if need be."""

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
    """Lets a command read from a terminal: the runner's own standard input is a file's."""

    @contextlib.contextmanager
    def isolation(self, input: Any = None, *rest: Any, **options: Any) -> Iterator[Any]:
        with super().isolation(None, *rest, **options) as streams:
            sys.stdin = Terminal(input)  # the runner puts the real one back
            yield streams


def call(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def type_in(lines: list[str], *args: object) -> Result:
    """Run a command on a terminal; say these lines, then Ctrl-D."""
    said = "".join(f"{line}\n" for line in lines)
    return TerminalRunner().invoke(app, [str(arg) for arg in args], input=said)
