"""The `mtpbuild` command: each command parses, calls one function and prints."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer
import typer.core

from mtpbuild.builder.cli.build import build, quantize, recipes, refit
from mtpbuild.builder.cli.make import make_engine
from mtpbuild.builder.cli.measure import bench, evaluate, report, study, verify
from mtpbuild.builder.cli.plan import plan
from mtpbuild.builder.cli.prefix import add_prefix, list_prefixes, remove_prefix
from mtpbuild.builder.cli.tune import tune_head
from mtpbuild.runtime.cli.commands import diff, inspect, list_engines, remove_engine, run
from mtpbuild.runtime.server.command import serve

# Typer exports its UsageError only as the base class of other errors.
USAGE_ERROR: Any = typer.BadParameter.__base__
HYPHEN = "\N{NON-BREAKING HYPHEN}"
PIPED = 10_000  # columns of what is no terminal: nothing is wrapped there


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


class PanelHelp:
    """The help of commands: flags by their panels, whole names, and no line breaks in a pipe."""

    def get_help(self, ctx: Any) -> str:
        formatter = ctx.make_formatter()
        terminal = sys.stdout.isatty()
        formatter.width = shutil.get_terminal_size().columns if terminal else PIPED
        self.format_help(ctx, formatter)  # type: ignore[attr-defined]
        return str(formatter.getvalue().rstrip().replace(HYPHEN, "-"))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels = dict[str, list[tuple[str, str]]]()
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            if record := parameter.get_help_record(ctx):
                name = "Arguments" if parameter.param_type_name == "argument" else "Options"
                text = record[1].replace("-", HYPHEN)  # a flag's name has no line break
                panels.setdefault(parameter.rich_help_panel or name, []).append((record[0], text))
        if commands := getattr(self, "commands", None):
            panels["Commands"] = [
                (name, command.help.partition("\n\n")[0]) for name, command in commands.items()
            ]
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records, col_max=26 if formatter.width > 60 else 4)


class Command(PanelHelp, typer.core.TyperCommand):
    """A command."""


class CommandGroup(PanelHelp, typer.core.TyperGroup):
    """A group of commands."""


class Commands(CommandGroup):
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
    rich_markup_mode=None,  # whose tables cut the names of flags
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
NAMES = {list_engines: "list", remove_engine: "rm", evaluate: "eval"}
for command in (
    *(build, refit, recipes, run, serve, list_engines, remove_engine, inspect, bench, verify),
    *(report, evaluate, diff, study, quantize, tune_head, plan),
):
    app.command(NAMES.get(command), cls=Command)(command)
prefix = typer.Typer(no_args_is_help=True, help="What prompts begin with, computed once.")
for name, command in {"add": add_prefix, "list": list_prefixes, "remove": remove_prefix}.items():
    prefix.command(name, cls=Command)(command)
app.add_typer(prefix, name="prefix", cls=CommandGroup)
