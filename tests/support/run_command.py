"""Runs commands in the test's process, on a terminal if needed."""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from typer.testing import CliRunner, Result

from mtpbuild.builder.cli import app

ENTER, CTRL_C, CTRL_D, CTRL_J = "\r", "\x03", "\x04", "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TerminalRunner(CliRunner):
    """A runner whose command reads from a terminal; the usual runner's input is a file."""

    @contextlib.contextmanager
    def isolation(self, *args: Any, **options: Any) -> Iterator[Any]:
        with super().isolation(*args, **options) as streams:
            sys.stdin = Terminal()  # the runner restores the real one
            yield streams


class ScreenRunner(CliRunner):
    """A runner whose command prints on a terminal."""

    @contextlib.contextmanager
    def isolation(self, *args: Any, **options: Any) -> Iterator[Any]:
        with super().isolation(*args, **options) as streams:
            sys.stdout.isatty = lambda: True  # type: ignore[method-assign]
            yield streams


def call(*args: object, input: str | bytes | None = None) -> Result:
    """Run a command; `input` is piped in."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=input)


def type_in(lines: Sequence[str], *args: object) -> Result:
    """Run a command on a terminal; type these lines, each with Enter, then Ctrl-D."""
    with typed("".join(f"{line}{ENTER}" for line in lines) + CTRL_D):
        return TerminalRunner().invoke(app, [str(arg) for arg in args])


@contextlib.contextmanager
def typed(keys: str) -> Iterator[None]:
    """Give prompts within the block these keys, a screen that nobody sees, and no history."""
    with (
        tempfile.TemporaryDirectory() as state,
        mock.patch.dict(os.environ, XDG_STATE_HOME=state),
        create_pipe_input() as pipe,
        create_app_session(input=pipe, output=DummyOutput()),
    ):
        pipe.send_text(keys)
        yield
