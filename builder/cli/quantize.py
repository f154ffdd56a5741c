"""The command `quantize`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from mtpbuild.builder.cli.output import progress
from mtpbuild.runtime.cli import error_line

if TYPE_CHECKING:
    from mtpbuild.builder.quantize.quantize import Quantized


@error_line
def quantize(
    model: Annotated[str, Option(help="Recipe name or checkpoint folder.")],
    to: Annotated[str, Option(help="Format of the main model: fp8, nvfp4, int8, int4 or bf16.")],
    out: Annotated[Path, Option(help="Folder of the new checkpoint.")],
    mtp: Annotated[
        str | None, Option(help="Format of the MTP modules. Default: as --to; with nvfp4, bf16.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        Option(help="Glob of modules to leave as they are, instead of the format's own."),
    ] = None,
    checkpoint: Annotated[Path | None, Option(help="Folder with the recipe's weights.")] = None,
    force: Annotated[
        bool, Option("--force", help="Replace a checkpoint that stands there.")
    ] = False,
) -> None:
    """Write a checkpoint in DeepSeek's FP8, ModelOpt's NVFP4 or ONNX Runtime's integers."""
    from mtpbuild.builder.checks import needs

    with progress("reading the checkpoint") as watch:
        with needs("build", "torch", "safetensors"):
            from mtpbuild.builder.quantize.quantize import QuantizeRequest, quantize
            from mtpbuild.builder.quantize.scheme import make_scheme
        scheme = make_scheme(to, mtp, tuple(exclude) if exclude else None)
        request = QuantizeRequest(model, scheme, out, checkpoint, force)
        done = quantize(request, watch)
    print_report(done)


def print_report(done: "Quantized") -> None:
    """A line per format, then what could not be quantised."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("format", "weights", "size", "relative error")
    for name, portion in done.portions.items():
        error = f"{portion.error:.2%}" if portion.squares else "-"
        table.add_row(name, str(portion.weights), f"{portion.bytes / 1e6:.1f} MB", error)
    console.print(table)
    if done.unfit:
        console.print(
            f"{len(done.unfit)} weights stay as they are: their columns do not split into blocks "
            f"({done.unfit[0]}, ..)",
            soft_wrap=True,
        )
    console.print(f"wrote {done.folder}", soft_wrap=True)
