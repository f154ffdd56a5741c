"""The `mtpbuild` command: each command parses, calls one function and prints."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpbuild.builder.cli.bench import bench
from mtpbuild.builder.cli.eval import evaluate
from mtpbuild.builder.cli.numbers import parse_nextn
from mtpbuild.builder.cli.plan import plan
from mtpbuild.builder.cli.quantize import quantize
from mtpbuild.builder.cli.verify import verify
from mtpbuild.runtime.cli import error_line, inspect, run
from mtpbuild.runtime.compat.flags import CompatFlags, read_flags
from mtpbuild.runtime.flag_groups import grouped
from mtpbuild.runtime.trace.cli import diff

if TYPE_CHECKING:
    from mtpbuild.builder.build import BuildRequest, BuiltEngine, Stages

app = typer.Typer(
    name="mtpbuild",
    help="Build and run multi-token-prediction engines for DeepSeek-V3/R1-class models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},  # of flags
)
app.command("run")(run)
app.command("inspect")(inspect)
app.command("bench")(bench)
app.command("verify")(verify)
app.command("eval")(evaluate)
app.command("diff")(diff)
app.command("quantize")(quantize)
app.command("plan")(plan)


@app.command("build")
@error_line
@grouped
def build(
    model: Annotated[str, typer.Option(help="Recipe name or checkpoint folder.")],
    compat: CompatFlags,
    nextn: Annotated[
        str | None,
        typer.Option(
            help="Draft tokens per step, 0..15; several: 0,1,2,3; auto: 0..4, chosen step by step. "
            "Default: the model's."
        ),
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="mtp-eagle or mtp-vanilla.")] = None,
    max_batch: Annotated[int, typer.Option(help="Requests that run at once.")] = 1,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Prompt and output tokens of a request together.")
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per prefill call.")] = 256,
    target: Annotated[
        str | None, typer.Option(help="What to compile for. Default: the recipe's, onnxruntime.")
    ] = None,
    device: Annotated[str, typer.Option(help="Of target inductor: cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Of target inductor's weights and caches: float32 or bfloat16.")
    ] = "float32",
    compute_capability: Annotated[
        str | None,
        typer.Option(help="Of a tensorrt-rtx engine's GPUs: sm89, sm120; several: sm89,sm120."),
    ] = None,
    fast_build: Annotated[
        bool, typer.Option("--fast-build", help="Target tensorrt: compile sooner, run slower.")
    ] = False,
    strip_weights: Annotated[
        bool, typer.Option("--strip-weights", help="Target tensorrt: one file of weights, not 3.")
    ] = False,
    tp: Annotated[
        int, typer.Option("--tp", help="Ranks that share the model, on target inductor.")
    ] = 1,
    ep: Annotated[
        int, typer.Option("--ep", help="Of these, groups with routed experts of their own.")
    ] = 1,
    rank: Annotated[
        int | None,
        typer.Option("--rank", help="Build this rank alone, from 0; default: all that lack."),
    ] = None,
    attention_dp: Annotated[
        bool,
        typer.Option(
            "--attention-dp",
            help="Ranks share the routed experts alone; each has max-batch requests of its own.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Engine directory; with several nextn, their parent.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Rebuild, and replace another model's engine.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder with the recipe's weights.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Main layers to build, 0-3, and the modules: to try a big checkpoint."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check all, say what it would be, write nothing."),
    ] = False,
) -> None:
    """Build one engine directory per nextn."""
    from mtpbuild.builder.build import BuildRequest
    from mtpbuild.builder.checkpoint.layers_slice import parse_layers
    from mtpbuild.builder.recipe import default_target
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
        compute_capability=() if compute_capability is None else (*compute_capability.split(","),),
        fast_build=fast_build,
        strip_weights=strip_weights,
        device=device,
        layers=None if layers is None else parse_layers(layers),
        tp=tp,
        ep=ep,
        attention_dp=attention_dp,
        rank=rank,
        dtype=dtype,  # type: ignore[arg-type]
        dry_run=dry_run,
    )
    if dry_run:
        check_with_progress(request)
    else:
        print_report(*build_with_progress(request))


@app.command("refit")
@error_line
def refit(
    engine: Annotated[Path, typer.Option(help="Engine directory.")],
    checkpoint: Annotated[
        str, typer.Option(help="New weights of the same architecture: a folder, or a recipe.")
    ],
) -> None:
    """Put new weights into an engine without lowering its programs again."""
    from rich.console import Console

    from mtpbuild.builder.build import needs

    with Console(stderr=True).status("reading the checkpoint") as status:
        with needs("build", "torch", "onnx", "onnxscript"):
            from mtpbuild.builder.refit import refit
        old, new = refit(engine, checkpoint, watch=lambda stage: status.update(stage))
    kept = len(new.programs)
    size = new.files["weights.safetensors"].size
    typer.echo(
        f"{engine}: weights of {old.model.name} -> {new.model.name}, {size / 1e6:.1f} MB; "
        f"its {kept} programs are as they were"
    )


@app.command("recipes")
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


def build_with_progress(request: "BuildRequest") -> tuple[list["BuiltEngine"], "Stages"]:
    """Build, naming the current stage on a terminal's error output."""
    from rich.console import Console

    from mtpbuild.builder.build import Stages, build

    with Console(stderr=True).status("reading the checkpoint") as status:
        stages = Stages(watch=lambda stage: status.update(stage))
        return build(request, stages), stages


def check_with_progress(request: "BuildRequest") -> None:
    """Check as `build` does, naming the current stage, and print what it would make."""
    from rich.console import Console

    from mtpbuild.builder.build import Stages
    from mtpbuild.builder.dry_run import dry_run, print_dry_run

    with Console(stderr=True).status("reading the checkpoint") as status:
        stages = Stages(watch=lambda stage: status.update(stage))
        done = dry_run(request, stages)
    print_dry_run(done)
    print_stages(stages)


def print_report(engines: list["BuiltEngine"], stages: "Stages") -> None:
    """Engines with their sizes, then the stages with their times and the peak memory."""
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
    if stages.seconds:
        print_stages(stages)


def print_stages(stages: "Stages") -> None:
    """Their times, and the peak memory of all."""
    import resource

    from rich.console import Console

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.seconds.items())
    Console().print(f"{times}; peak memory {peak:.0f} MiB", highlight=False, soft_wrap=True)
