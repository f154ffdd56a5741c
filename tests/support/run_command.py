"""Runs commands in the test's process, on a terminal if needed."""

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from typer.testing import CliRunner, Result

from mtpbuild.builder.cli import app


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Keyboard(Terminal):
    """A terminal on which these lines are typed; a KeyboardInterrupt is Ctrl-C."""

    def __init__(self, lines: Sequence[str | KeyboardInterrupt]) -> None:
        super().__init__()
        self._lines = iter(lines)

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        line = next(self._lines, None)
        if isinstance(line, KeyboardInterrupt):
            raise line
        return "" if line is None else f"{line}\n"


class TerminalRunner(CliRunner):
    """Lets a command read from a terminal, where the usual runner's standard input is a file."""

    def __init__(self, lines: Sequence[str | KeyboardInterrupt]) -> None:
        super().__init__()
        self._lines = lines

    @contextlib.contextmanager
    def isolation(self, *args: Any, **options: Any) -> Iterator[Any]:
        with super().isolation(*args, **options) as streams:
            sys.stdin = Keyboard(self._lines)  # the runner restores the real one
            yield streams


def call(*args: object, input: str | bytes | None = None) -> Result:
    """Runs a command; `input` is piped in."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=input)


def type_in(lines: Sequence[str | KeyboardInterrupt], *args: object) -> Result:
    """Runs a command on a terminal; types these lines and Ctrl-C, then Ctrl-D."""
    return TerminalRunner(lines).invoke(app, [str(arg) for arg in args])
