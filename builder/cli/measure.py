"""The commands that measure engines: `bench`, `eval`, `verify`, `report` and `study`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from typer import Option

from mtpbuild.builder.cli.shared import (
    TargetFlags,
    parse_nextn,
    print_result,
    print_written_results,
    show_progress,
)
from mtpbuild.builder.flags import (
    DatasetFlags,
    EvalFlags,
    VerifyFlags,
    make_drafter_flag,
    make_target_flag,
)
from mtpbuild.runtime.checks import parse_list
from mtpbuild.runtime.cli.commands import LoadFlags, error_line
from mtpbuild.runtime.cli.sampling_flags import (
    CompatFlags,
    RelaxedFlags,
    SamplingFlags,
    make_sampling_params,
    read_flags,
)
from mtpbuild.runtime.configuration.settings import (
    Configuration,
    check_engine,
    name_source,
    read_requested_ranks,
)
from mtpbuild.runtime.contract.rules import BUILT_IN
from mtpbuild.runtime.contract.target_options import list_changed_flags
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import (
    drafts_flag,
    flag,
    group_flags,
    model_flag,
    output_flag,
)
from mtpbuild.runtime.ranks import ALONE
from mtpbuild.runtime.threads import make_threads_flag

T = TypeVar("T")
NEXTN = "0,1,2,3"
BLOG: Configuration = {
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 10,
    "relaxed_delta": 0.6,
}
TOPK, DELTA = "2,5,10", "0.1,0.3,0.6"


@error_line
@group_flags
def bench(
    model: Annotated[str, Option(help="Recipe, folder, GGUF file, or OWNER/NAME[:FILE].")],
    *,
    dataset: DatasetFlags,
    concurrency: str = flag(
        "1", "Requests that run at once; several to compare: 1,2,4,8.", panel="Requests"
    ),
    sampling: SamplingFlags,
    nextn: str | None = drafts_flag(
        None, f"Draft tokens per step to compare with 0: numbers or auto. Default: {NEXTN}."
    ),
    drafter: str | None = make_drafter_flag(),
    relaxed: bool = drafts_flag(False, "Relaxed acceptance as in TensorRT-LLM's blog: 10, 0.6."),
    relaxing: RelaxedFlags,
    target: str | None = make_target_flag(),
    threads: int | None = make_threads_flag(),
    out: Path = output_flag(Path("bench_results"), "Folder for bench.json and bench.png."),
    json: bool = output_flag(False, "Print bench.json instead of the tables."),
    target_flags: TargetFlags,
    load_flags: LoadFlags,
    compat: CompatFlags,
) -> None:
    """Measure every nextn against nextn 0 on the same requests, and say whether MTP pays."""
    from mtpbuild.builder.plan.request import BuildRequest
    from mtpbuild.builder.targets.choice import choose_target
    from mtpbuild.lab.bench.bench import BenchRequest, bench
    from mtpbuild.lab.bench.report import list_pictures, print_benchmarks
    from mtpbuild.lab.measure.prompts import OUTPUT_LEN, Dataset

    numbers = None if nextn is None else parse_nextn(nextn)
    also = name_source(BLOG, "--relaxed") if relaxed else []
    settings = read_flags(compat, relaxing, also=also, nextn=numbers, drafter=drafter)
    if read_requested_ranks(settings) != ALONE:
        raise UsageError("bench builds engines of one rank: leave the parallel sizes out")
    if numbers is None:
        numbers = (settings["nextn"],) if "nextn" in settings else parse_nextn(NEXTN)
    params = make_sampling_params(sampling, settings, max_tokens=OUTPUT_LEN)
    sizes = parse_list("--concurrency", concurrency, int, "1,2,4,8")
    options = list_changed_flags(target_flags)
    if target is None:
        target, options, _ = choose_target(model, options)
    rules = () if params.acceptance in BUILT_IN else (params.acceptance,)
    built = BuildRequest(
        model, numbers, settings.get("drafter"), target, acceptance_rules=rules, options=options
    )
    requests = Dataset(**vars(dataset), params=params)
    request = BenchRequest(built, requests, sizes, threads, out, list_changed_flags(load_flags))
    with show_progress("reading the checkpoint") as watch:
        reports = bench(request, watch)
    show = partial(print_benchmarks, reports)
    print_written_results(out / "bench.json", json, show, list_pictures(reports))


@error_line
@group_flags
def evaluate(
    engine: Annotated[Path, Option(help="Engine directory.")],
    *,
    flags: EvalFlags,
    json: bool = output_flag(False, "Print eval.json instead of the tables."),
    sampling: SamplingFlags,
    relaxed_topk: str | None = drafts_flag(
        None, f"Values to try at temperature 0. Default: {TOPK}."
    ),
    relaxed_delta: str | None = drafts_flag(
        None, f"Values to try with each of them. Default: {DELTA}."
    ),
    use_relaxed_acceptance_for_thinking: bool = drafts_flag(
        False, "TensorRT-LLM's; at temperature 0 it is always compared."
    ),
    load_flags: LoadFlags,
    compat: CompatFlags,
) -> None:
    """Compare right answers and speed of strict with relaxed acceptance, or with another rule."""
    from mtpbuild.lab.eval.evaluate import OUTPUT_TOKENS, EvalRequest, evaluate
    from mtpbuild.lab.eval.report import plot_evaluation, print_evaluation
    from mtpbuild.runtime.contract.manifest import read_manifest

    relaxing = [relaxed_topk, relaxed_delta, use_relaxed_acceptance_for_thinking or None]
    if sampling.temperature > 0 and relaxing != [None] * 3:
        raise UsageError("relaxed acceptance is for greedy requests: set --temperature to 0")
    if sampling.acceptance in BUILT_IN:
        raise UsageError("--acceptance: eval compares strict with the others by itself")
    if sampling.acceptance is not None and relaxing != [None] * 3:
        raise UsageError(f"--acceptance {sampling.acceptance} is compared with strict alone")
    settings, manifest = read_flags(compat), read_manifest(engine)
    check_engine(settings, manifest.build)
    topk, delta = read_grid(relaxed_topk, relaxed_delta, settings)
    params = make_sampling_params(sampling, settings, manifest, max_tokens=OUTPUT_TOKENS)
    options = list_changed_flags(load_flags)
    request = EvalRequest(engine, topk, delta, params, options=options, **vars(flags))
    with show_progress("reading the engine") as watch:
        report = evaluate(request, watch)
    show, picture = partial(print_evaluation, report), plot_evaluation(report)
    print_written_results(flags.out / "eval.json", json, show, {"eval": picture})


def read_grid(
    topk: str | None, delta: str | None, settings: Configuration
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the values to try: the flags', else the configuration's, else the defaults."""
    on = settings if settings.get("use_relaxed_acceptance_for_thinking") else {}

    def read(name: str, typed: str | None, usual: str, kind: Callable[[str], T]) -> tuple[T, ...]:
        flag, configured = f"--relaxed-{name}", on.get(f"relaxed_{name}")
        if typed and configured is not None:
            raise UsageError(f"{flag} {typed} and the configuration's {configured}; drop one")
        if configured is not None:
            return (configured,)
        return tuple(dict.fromkeys(parse_list(flag, typed or usual, kind, usual)))

    topks, deltas = read("topk", topk, TOPK, int), read("delta", delta, DELTA, float)
    if min(topks) < 2 or not 0 <= min(deltas) <= max(deltas) <= 1:
        raise UsageError("--relaxed-topk is from 2 (1 is strict), --relaxed-delta in 0..1")
    return topks, deltas


@error_line
@group_flags
def verify(
    engine: Annotated[Path, Option(help="Engine directory.")],
    *,
    flags: VerifyFlags,
    json: bool = flag(False, "As one JSON object."),
    load_flags: LoadFlags,
) -> None:
    """Check that an engine says what its model says, whatever it drafts; exit code 1 if not."""
    from mtpbuild.lab.verify import verify

    request = verify.VerifyRequest(
        engine=engine, options=list_changed_flags(load_flags), **vars(flags)
    )
    with show_progress("reading the engine") as watch:
        done = verify.verify(request, watch)
    print_result(json, verify.make_verify_json(done), lambda: verify.print_verification(done))
    if done.failed:
        raise typer.Exit(1)


@error_line
@group_flags
def report(
    model: Annotated[
        str, typer.Argument(help="Recipe, folder, GGUF file, OWNER/NAME[:FILE], or an engine.")
    ],
    quick: bool = flag(False, "Few and short answers: a model of 4 B in about 10 minutes."),
    no_hashes: bool = flag(False, "Leave out the hashes of configuration, tokenizer and index."),
    checkpoint: Path | None = model_flag(
        None, "Folder with the recipe's weights, or with those that the engine was built of."
    ),
    mtp: Path | None = model_flag(None, "File or folder with the MTP head, as of `build`."),
    weights: str | None = model_flag(
        None, "Format of the engine's weights, as of `build`. Default: what fits, as of `run`."
    ),
    threads: int | None = make_threads_flag(),
    out: Path = output_flag(Path("report_results"), "Folder for report.json and report.html."),
) -> None:
    """Build, check and time a model; write all that helps others into one file (docs/report.md).

    It has no prompts, names or paths, and nothing is sent.
    """
    from mtpbuild.lab.report.page import write_report
    from mtpbuild.lab.report.report import ReportRequest, make_report

    say = partial(typer.echo, err=True)
    request = ReportRequest(model, checkpoint, mtp, weights, threads, quick, not no_hashes, out)
    with show_progress("reading the checkpoint") as watch:
        document = make_report(request, watch, say)
    write_report(document, out)
    for problem in document["problems"]:
        typer.echo(f"note: {problem}")
    typer.echo(f"wrote {out / 'report.json'} and {out / 'report.html'}")


@error_line
@group_flags
def study(
    traces: Annotated[list[Path], typer.Argument(help="Traces (.jsonl) to compare.")],
    out: Path = flag(Path("study_results"), "Folder for study.json, study.csv and study.png."),
    json: bool = flag(False, "Print study.json instead of the tables."),
) -> None:
    """Say from traces which drafts are accepted: by position, over the context, by certainty."""
    from mtpbuild.lab.eval.study import plot_study, print_study, study

    studies = study(traces, out)
    show = partial(print_study, studies)
    print_written_results(out / "study.json", json, show, {"study": plot_study(studies)})
