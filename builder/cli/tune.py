"""The command `tune-head`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from mtpbuild.builder.cli.shared import show_progress
from mtpbuild.builder.flags import TuneFlags
from mtpbuild.runtime.cli.commands import error_line
from mtpbuild.runtime.flag_groups import group_flags


@error_line
@group_flags
def tune_head(
    model: Annotated[str, Option(help="Recipe name, checkpoint folder, or OWNER/NAME.")],
    out: Annotated[Path, Option(help="Folder of the new head.")],
    flags: TuneFlags,
) -> None:
    """Train the MTP modules for prompts like those of a file; the text stays the same."""
    from mtpbuild.runtime.errors import explain_missing_package

    with show_progress("reading the checkpoint") as watch:
        with explain_missing_package("tune-head", "build", "torch", "onnx", "onnxscript"):
            from mtpbuild.builder.stages import Stages
            from mtpbuild.lab.tune.tune_head import TuneRequest, tune_head
        done = tune_head(TuneRequest(model=model, out=out, **vars(flags)), Stages(watch))
    typer.echo(
        f"acceptance length of {done.drafter} at nextn {done.nextn} on {done.prompts} held-out "
        f"prompts: {done.before:.2f} -> {done.after:.2f}; {done.same} of {done.prompts} texts are "
        f"the same\nwrote {out}: trained on {done.texts:,} texts of {done.tokens:,} tokens; "
        f"`mtpbuild build --model {model} --nextn {done.nextn} --mtp {out}` makes an engine with it"
    )
