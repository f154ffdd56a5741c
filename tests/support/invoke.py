"""Runs the compiler's commands in the test's own process."""

import re
from typing import Any

import typer
from typer.testing import CliRunner

from mtpbuild.builder.cli import app


def invoke(*args: object) -> tuple[int, str, str]:
    """Run a command; return its exit code, standard output and standard error.

    The lines on standard error that say at which stage it is are left out.
    """
    done = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "300"})
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stdout, without_stages(done.stderr)


def refusal(*args: object, code: int = 2) -> str:
    """Run a command that must end with this code and one line; return it without `error: `."""
    found, out, err = invoke(*args)
    assert (found, out) == (code, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").removesuffix("\n")


def without_stages(errors: str) -> str:
    """Leave out the lines of `StageLines`."""
    return re.sub(r"^\[\d+ s\] .*\n", "", errors, flags=re.MULTILINE)


def options(command: str) -> list[str]:
    """List a command's flags, sorted."""
    found: Any = typer.main.get_command(app)
    for part in command.split():
        found = found.commands[part]
    names = [name for option in found.params for name in option.opts + option.secondary_opts]
    return sorted(name for name in names if name.startswith("-"))  # arguments have none
