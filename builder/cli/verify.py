"""The command `verify`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from mtpbuild.builder.cli.output import progress
from mtpbuild.runtime.cli import error_line


@error_line
def verify(
    engine: Annotated[Path, Option(help="Engine directory.")],
    against: Annotated[
        Path | None, Option(help="Engine to compare with; default: nextn 0's, built if missing.")
    ] = None,
    model: Annotated[
        str | None,
        Option(help="Recipe name or checkpoint folder; default: the recipe of that name."),
    ] = None,
    prompts: Annotated[
        Path | None, Option(help="JSONL file (docs/cli-json.md); default: built-in ones.")
    ] = None,
    output_len: Annotated[int, Option(help="Tokens of each text.")] = 64,
    seeds: Annotated[int, Option(help="Sampled texts per prompt, for their law.")] = 250,
    threads: Annotated[int | None, Option(help="CPU threads; default: all cores.")] = None,
    json: Annotated[bool, Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Check that an engine says what its model says, whatever it drafts; exit code 1 if not."""
    from json import dumps

    from mtpbuild.builder.verify.report import print_report, to_json
    from mtpbuild.builder.verify.verify import VerifyRequest, verify

    request = VerifyRequest(engine, against, model, prompts, output_len, seeds, threads)
    with progress("reading the engine") as watch:
        verification = verify(request, watch)
    if json:
        typer.echo(dumps(to_json(verification), indent=1))
    else:
        print_report(verification)
    if verification.failed:
        raise typer.Exit(1)
