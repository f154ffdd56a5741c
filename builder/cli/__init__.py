"""The `mtpbuild` command: each command parses, calls one function and prints."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer
import typer.core

from mtpbuild.builder.cli.build import build, quantize, recipes, refit
from mtpbuild.builder.cli.make import make_engine
from mtpbuild.builder.cli.measure import bench, evaluate, study, verify
from mtpbuild.builder.cli.plan import plan
from mtpbuild.builder.cli.prefix import app as prefix
from mtpbuild.builder.cli.tune import tune_head
from mtpbuild.runtime.cli.commands import diff, inspect, run
from mtpbuild.runtime.cli.engine_commands import list_engines, remove_engine
from mtpbuild.runtime.server.command import serve

# Typer exports its UsageError only as the base class of other errors.
USAGE_ERROR: Any = typer.BadParameter.__base__


@contextmanager
def one_line() -> Iterator[None]:
    """Print Typer's usage errors in one line, as the commands print their own errors."""
    try:
        yield
    except USAGE_ERROR as error:
        if "\n" in error.message:  # the help, shown if there are no arguments
            raise
        command = error.ctx.command_path if error.ctx else "mtpbuild"
        typer.echo(
            f"error: {error.format_message().rstrip('.')} (see `{command} --help`)", err=True
        )
        raise typer.Exit(error.exit_code) from None


class Commands(typer.core.TyperGroup):
    """The group of all commands; their usage errors are one line."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with one_line():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with one_line():
            return super().invoke(ctx)


app = typer.Typer(
    name="mtpbuild",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),  # of flags
        "help_option_names": ["-h", "--help"],
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mtpbuild {version('mtpbuild')}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    """Build and run multi-token-prediction engines for DeepSeek-V3/R1-class models."""
    context.obj = make_engine  # for `run`, as the run time does not know the compiler


# A command has its function's name, except for those whose names are Python's or no words.
for command in (build, refit, recipes, run, serve):
    app.command()(command)
app.command("list")(list_engines)
app.command("rm")(remove_engine)
for command in (inspect, bench, verify):
    app.command()(command)
app.command("eval")(evaluate)
for command in (diff, study, quantize, tune_head, plan):
    app.command()(command)
app.add_typer(prefix, name="prefix")
