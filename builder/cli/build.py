"""The commands `build`, `refit`, `quantize` and `recipes`."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from mtpbuild.builder.cli.shared import TargetFlags, parse_nextn, show_progress
from mtpbuild.builder.flags import (
    BuildFlags,
    CalibrationFlags,
    RankFlags,
    make_drafter_flag,
    make_target_flag,
)
from mtpbuild.runtime.cli.commands import error_line
from mtpbuild.runtime.cli.sampling_flags import CompatFlags, read_flags
from mtpbuild.runtime.contract.target_options import list_changed_flags
from mtpbuild.runtime.flag_groups import drafts_flag, engine_flag, flag, group_flags, model_flag

if TYPE_CHECKING:
    from mtpbuild.builder.compiler.build import BuiltEngine
    from mtpbuild.builder.plan.request import BuildRequest


@error_line
@group_flags
def build(
    model: Annotated[
        str,
        Option(
            help="Recipe, folder, GGUF file, or OWNER/NAME[:FILE] of Hugging Face.",
            rich_help_panel="Model",
        ),
    ],
    *,
    layers: str | None = model_flag(None, "Build only these main layers, 0-3, and the modules."),
    weights: str | None = flag(
        None,
        "Quantise to int8, int4, fp8 or nvfp4; or floats. Default: as stored, or int8.",
        panel="Weights",
    ),
    head_weights: str | None = flag(
        None,
        "With --weights, embedding and head: int8, int4 or none. Default: int8 for integers.",
        panel="Weights",
    ),
    weight_bits: float | None = flag(
        None,
        "With --weights int4, bits of a weight on average, such as 5.0: some are int8 then.",
        panel="Weights",
    ),
    calibration: CalibrationFlags,
    nextn: str | None = drafts_flag(
        None,
        "Draft tokens per step, 0..15; several: 0,1,2,3; auto: 0..5, chosen step by step. "
        "Default: the model's.",
    ),
    drafter: str | None = make_drafter_flag(),
    acceptance_rule: list[str] | None = drafts_flag(
        None, "Rule of acceptance of another package that requests may choose; may be repeated."
    ),
    target: str | None = make_target_flag(),
    prefix: list[Path] | None = engine_flag(
        None, "File that prompts begin with, computed now: a text, or messages.json; repeatable."
    ),
    flags: BuildFlags,
    ranks: RankFlags,
    target_flags: TargetFlags,
    compat: CompatFlags,
) -> None:
    """Build one engine directory per nextn."""
    from mtpbuild.builder.checkpoint.layers_slice import parse_layers
    from mtpbuild.builder.plan.request import BuildRequest
    from mtpbuild.builder.targets.choice import choose_target
    from mtpbuild.builder.weights.scheme import add_calibration, build_scheme
    from mtpbuild.runtime.configuration.settings import read_requested_ranks, read_sampling_settings

    numbers = None if nextn is None else parse_nextn(nextn)
    settings = read_flags(compat, also=ranks.settings(), nextn=numbers, drafter=drafter)
    if read_sampling_settings(settings):
        typer.echo("note: acceptance is chosen per request: repeat it to `mtpbuild run`", err=True)
    if numbers is None and "nextn" in settings:
        numbers = (settings["nextn"],)
    options, why = list_changed_flags(target_flags), None
    if target is None:
        target, options, why = choose_target(model, options, flags.rank)
    if why is not None:
        typer.echo(f"target {target}: {why}; --target names another")
    request = BuildRequest(
        model=model,
        nextn=numbers,
        drafter=settings.get("drafter"),
        target=target,
        ranks=read_requested_ranks(settings),
        layers=None if layers is None else parse_layers(layers),
        scheme=add_calibration(
            build_scheme(weights, head_weights, weight_bits),
            calibration.calibrate,
            calibration.calibration_text,
        ),
        acceptance_rules=tuple(acceptance_rule or ()),
        options=options,
        **vars(flags),
    )
    run_build(request, prefix or ())


def run_build(request: "BuildRequest", prefixes: Sequence[Path]) -> list["BuiltEngine"]:
    """Download and build, or check what a build would do with --dry-run; print the result.

    Returns the engines.
    """
    from mtpbuild.builder.cli.tables import print_dry_run, print_engines, print_stages
    from mtpbuild.builder.compiler.build import build
    from mtpbuild.builder.compiler.dry_run import dry_run
    from mtpbuild.builder.compiler.prefixes import add_prefix, read_files
    from mtpbuild.builder.stages import Stages
    from mtpbuild.lab.measure.workbench import WORKBENCH

    beginnings = read_files(prefixes, request.target, request.ranks.tp)
    with show_progress() as watch:  # from the first stage on: downloads show bars of their own
        stages = Stages(watch)
        foreseen = dry_run(request, stages) if request.dry_run else None
        engines = build(request, WORKBENCH, stages) if foreseen is None else []
        for engine, name in itertools.product(engines, beginnings):
            watch(f"prefix {name} of {engine.folder.name}")
            add_prefix(engine.folder, name, beginnings[name])
    if foreseen is None:
        print_engines(engines)
    else:
        print_dry_run(foreseen)
    if stages.seconds:
        print_stages(stages)
    return engines


@error_line
@group_flags
def refit(
    engine: Annotated[Path, Option(help="Engine directory.")],
    checkpoint: Annotated[
        str, Option(help="New weights of the same architecture: a folder, a recipe, or OWNER/NAME.")
    ],
    mtp: Path | None = flag(None, "File or folder with the MTP head, as of `build`."),
    chat_template: Path | None = flag(None, "Jinja file with the chat template, as of `build`."),
) -> None:
    """Put new weights into an engine without lowering its programs again."""
    from mtpbuild.runtime.errors import explain_missing_package

    with show_progress("reading the checkpoint") as watch:
        with explain_missing_package("refit", "build", "torch", "onnx", "onnxscript"):
            from mtpbuild.builder.compiler.refit import refit
        old, new = refit(engine, checkpoint, watch, mtp, chat_template)
    size = new.files["weights.safetensors"].size
    typer.echo(
        f"{engine}: weights of {old.model.name} -> {new.model.name}, {size / 1e6:.1f} MB; "
        f"its {len(new.programs)} programs are as they were"
    )


@error_line
@group_flags
def quantize(
    model: Annotated[str, Option(help="Recipe name, checkpoint folder, or OWNER/NAME.")],
    to: Annotated[str, Option(help="Format of the main model: fp8, nvfp4, int8, int4 or bf16.")],
    out: Annotated[Path, Option(help="Folder of the new checkpoint.")],
    *,
    mtp: str | None = flag(None, "Format of the MTP modules. Default: as --to; with nvfp4, bf16."),
    head: str | None = flag(
        None, "Format of embedding and head: int8, int4 or none. Default: none."
    ),
    exclude: list[str] | None = flag(
        None, "Glob of modules to leave as they are, instead of the format's own."
    ),
    calibration: CalibrationFlags,
    checkpoint: Path | None = flag(None, "Folder with the recipe's weights."),
    force: bool = flag(False, "Replace a checkpoint that stands there."),
) -> None:
    """Write a checkpoint in DeepSeek's FP8, ModelOpt's NVFP4 or mtpbuild's integers."""
    from mtpbuild.builder.cli.tables import print_quantized
    from mtpbuild.runtime.errors import explain_missing_package

    with show_progress("reading the checkpoint") as watch:
        with explain_missing_package("quantize", "build", "torch", "safetensors"):
            from mtpbuild.builder.compiler.quantize import QuantizeRequest, quantize
            from mtpbuild.builder.weights.scheme import add_calibration, make_scheme
        plain = make_scheme(to, mtp, tuple(exclude) if exclude else None, head)
        scheme = add_calibration(plain, calibration.calibrate, calibration.calibration_text)
        from mtpbuild.lab.measure.workbench import WORKBENCH

        done = quantize(QuantizeRequest(model, scheme, out, checkpoint, force), WORKBENCH, watch)
    print_quantized(done)


@error_line
@group_flags
def recipes(
    json: bool = flag(False, "As one JSON list."),
    fits: bool = flag(False, "What this machine's CPU can run, by tokens/s, as plan --cpu has it."),
) -> None:
    """List what can be built by name."""
    from mtpbuild.builder.cli.tables import print_fitting, print_recipes
    from mtpbuild.builder.plan.recipe import load_recipes

    if not fits:
        print_recipes(json)
        return
    from mtpbuild.builder.plan.machine import measure_machine
    from mtpbuild.lab.forecast.fitting import find_fitting
    from mtpbuild.lab.measure.host import measure_bandwidth

    bandwidth = measure_bandwidth()
    print_fitting(find_fitting(load_recipes(), measure_machine(), bandwidth), bandwidth, json)
