"""The commands `build`, `refit` and `recipes`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from mtpbuild.builder.cli.flags import RankFlags, make_target_flags, said
from mtpbuild.builder.cli.numbers import parse_nextn
from mtpbuild.builder.cli.output import progress
from mtpbuild.runtime.cli import error_line
from mtpbuild.runtime.compat.flags import CompatFlags, read_flags
from mtpbuild.runtime.flag_groups import grouped

if TYPE_CHECKING:
    from mtpbuild.builder.build import BuiltEngine
    from mtpbuild.builder.stages import Stages

TargetFlags: Any = make_target_flags()


@error_line
@grouped
def build(
    model: Annotated[str, Option(help="Recipe name or checkpoint folder.")],
    compat: CompatFlags,
    target_flags: TargetFlags,
    ranks: RankFlags,
    nextn: Annotated[
        str | None,
        Option(
            help="Draft tokens per step, 0..15; several: 0,1,2,3; auto: 0..4, chosen step by step. "
            "Default: the model's."
        ),
    ] = None,
    drafter: Annotated[str | None, Option(help="mtp-eagle or mtp-vanilla.")] = None,
    max_batch: Annotated[int, Option(help="Requests that run at once.")] = 1,
    max_seq_len: Annotated[
        int | None, Option(help="Prompt and output tokens of a request together.")
    ] = None,
    prefill_chunk: Annotated[int, Option(help="Prompt tokens per prefill call.")] = 256,
    target: Annotated[
        str | None, Option(help="What to compile for. Default: the recipe's, onnxruntime.")
    ] = None,
    rank: Annotated[
        int | None,
        Option("--rank", help="Build this rank alone, from 0; default: all that lack."),
    ] = None,
    out: Annotated[
        Path | None, Option(help="Engine directory; with several nextn, their parent.")
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Rebuild, and replace another model's engine.")
    ] = False,
    checkpoint: Annotated[Path | None, Option(help="Folder with the recipe's weights.")] = None,
    layers: Annotated[
        str | None,
        Option(help="Main layers to build, 0-3, and the modules: to try a big checkpoint."),
    ] = None,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Check all, say what it would be, write nothing."),
    ] = False,
) -> None:
    """Build one engine directory per nextn."""
    from mtpbuild.builder.build import build
    from mtpbuild.builder.checkpoint.layers_slice import parse_layers
    from mtpbuild.builder.dry_run import dry_run as run_dry
    from mtpbuild.builder.dry_run import print_dry_run
    from mtpbuild.builder.recipe import default_target
    from mtpbuild.builder.request import BuildRequest
    from mtpbuild.builder.stages import Stages
    from mtpbuild.runtime.compat.settings import sampling_settings

    numbers = None if nextn is None else parse_nextn(nextn)
    settings = read_flags(compat, nextn=numbers, drafter=drafter)
    if sampling_settings(settings):
        typer.echo("note: acceptance is chosen per request: repeat it to `mtpbuild run`", err=True)
    if numbers is None and settings.nextn is not None:
        numbers = (settings.nextn,)
    request = BuildRequest(
        model=model,
        nextn=numbers,
        drafter=settings.drafter,
        max_batch=max_batch,
        max_seq_len=max_seq_len,
        prefill_chunk=prefill_chunk,
        target=target or default_target(model),
        out=out,
        force=force,
        checkpoint=checkpoint,
        ranks=ranks.ranks(),
        rank=rank,
        layers=None if layers is None else parse_layers(layers),
        dry_run=dry_run,
        options=said(target_flags),
    )
    with progress("reading the checkpoint") as watch:
        stages = Stages(watch)
        engines = None if dry_run else build(request, stages)
        foreseen = run_dry(request, stages) if dry_run else None
    if foreseen is not None:
        print_dry_run(foreseen)
    if engines is not None:
        print_engines(engines)
    if stages.seconds:
        print_stages(stages)


@error_line
def refit(
    engine: Annotated[Path, Option(help="Engine directory.")],
    checkpoint: Annotated[
        str, Option(help="New weights of the same architecture: a folder, or a recipe.")
    ],
) -> None:
    """Put new weights into an engine without lowering its programs again."""
    from mtpbuild.builder.checks import needs

    with progress("reading the checkpoint") as watch:
        with needs("build", "torch", "onnx", "onnxscript"):
            from mtpbuild.builder.refit import refit
        old, new = refit(engine, checkpoint, watch)
    kept = len(new.programs)
    size = new.files["weights.safetensors"].size
    typer.echo(
        f"{engine}: weights of {old.model.name} -> {new.model.name}, {size / 1e6:.1f} MB; "
        f"its {kept} programs are as they were"
    )


@error_line
def recipes() -> None:
    """List what can be built by name."""
    from rich.console import Console
    from rich.table import Table

    from mtpbuild.builder.recipe import load_recipes

    table = Table("model", "engine", "description")
    for recipe in load_recipes():
        table.add_row(recipe.name, f"engines/{recipe.engine}_n<nextn>", recipe.description)
    Console().print(table)


def print_engines(engines: list["BuiltEngine"]) -> None:
    """Show the engines with their sizes, and which of their ranks are here."""
    from rich.console import Console
    from rich.table import Table

    from mtpbuild.runtime.manifest import ranks_here

    console = Console()
    table = Table("engine", "nextn", "drafter", "files", "size", "status")
    for engine in engines:
        build, files = engine.manifest.build, engine.file_sizes()
        table.add_row(
            str(engine.folder),
            build.drafts,
            build.drafter or "-",
            str(len(files)),
            f"{sum(files) / 1e6:.1f} MB",
            "unchanged" if engine.unchanged else "built",
        )
    console.print(table)
    for engine in engines:
        ranks = ranks_here(engine.folder, engine.manifest)
        if engine.manifest.split and len(ranks) < engine.manifest.build.tp:
            here = ", ".join(map(str, ranks))
            console.print(f"{engine.folder}: of {engine.manifest.build.tp} ranks here: {here}")


def print_stages(stages: "Stages") -> None:
    """Show how long each stage took, and the peak memory of all."""
    import resource

    from rich.console import Console

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.seconds.items())
    Console().print(f"{times}; peak memory {peak:.0f} MiB", highlight=False, soft_wrap=True)
