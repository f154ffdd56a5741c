"""The `mtpbuild` command: each command parses, calls one function and prints."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from mtpbuild.builder.cli.build import build, quantize, recipes, refit
from mtpbuild.builder.cli.measure import bench, evaluate, verify
from mtpbuild.builder.cli.plan import plan
from mtpbuild.runtime.cli import diff, inspect, run
from mtpbuild.runtime.server.command import serve

app = typer.Typer(
    name="mtpbuild",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),  # of flags
        "help_option_names": ["-h", "--help"],
    },
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mtpbuild {version('mtpbuild')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Build and run multi-token-prediction engines for DeepSeek-V3/R1-class models."""


COMMANDS: dict[str, Callable[..., None]] = {
    "build": build,
    "refit": refit,
    "recipes": recipes,
    "run": run,
    "serve": serve,
    "inspect": inspect,
    "bench": bench,
    "verify": verify,
    "eval": evaluate,
    "diff": diff,
    "quantize": quantize,
    "plan": plan,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
