"""The command `bench`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from mtpbuild.builder.cli.numbers import parse_nextn
from mtpbuild.builder.cli.output import progress, show_results
from mtpbuild.runtime.cli import error_line
from mtpbuild.runtime.compat.flags import CompatFlags, RelaxedFlags, read_flags
from mtpbuild.runtime.compat.settings import Settings, Source
from mtpbuild.runtime.flag_groups import grouped, parse_list
from mtpbuild.runtime.sampling_flags import SamplingFlags, sampling_params

NEXTN = "0,1,2,3"
BLOG = Settings(use_relaxed_acceptance_for_thinking=True, relaxed_topk=10, relaxed_delta=0.6)


@error_line
@grouped
def bench(
    model: Annotated[str, Option(help="Recipe name or checkpoint folder.")],
    sampling: SamplingFlags,
    compat: CompatFlags,
    relaxing: RelaxedFlags,
    nextn: Annotated[
        str | None,
        Option(
            help="Draft tokens per step to compare, numbers or auto; 0 is always among them. "
            f"Default: {NEXTN}."
        ),
    ] = None,
    concurrency: Annotated[
        str, Option(help="Requests that run at once; several to compare: 1,2,4,8.")
    ] = "1",
    drafter: Annotated[str | None, Option(help="mtp-eagle or mtp-vanilla.")] = None,
    dataset: Annotated[
        str | None, Option(help="code, reasoning, or a JSONL file (docs/bench.md). Default: both.")
    ] = None,
    num_requests: Annotated[
        int | None, Option(help="Default: 20 of the built-in ones, all of a file's.")
    ] = None,
    input_len: Annotated[
        int | None, Option(help="Cut or extend every prompt to so many tokens.")
    ] = None,
    output_len: Annotated[
        int | None, Option(help="Most output tokens; default: the dataset's, or 256.")
    ] = None,
    relaxed: Annotated[
        bool, Option("--relaxed", help="Relaxed acceptance as in TensorRT-LLM's blog: 10, 0.6.")
    ] = False,
    threads: Annotated[int | None, Option(help="CPU threads; default: all cores.")] = None,
    out: Annotated[Path, Option(help="Folder for bench.json and bench.png.")] = Path(
        "bench_results"
    ),
    json: Annotated[bool, Option("--json", help="Print bench.json instead of the tables.")] = False,
) -> None:
    """Measure every nextn against nextn 0 on the same requests, and say whether MTP pays."""
    from mtpbuild.builder.bench.bench import JSON, BenchRequest, bench
    from mtpbuild.builder.bench.dataset import OUTPUT_LEN, Asked
    from mtpbuild.builder.bench.engines import Wanted
    from mtpbuild.builder.bench.report import print_batches, print_report

    numbers = None if nextn is None else parse_nextn(nextn)
    settings = read_flags(
        compat,
        relaxing,
        also=[Source("--relaxed", BLOG)] if relaxed else [],
        nextn=numbers,
        drafter=drafter,
    )
    if numbers is None:
        numbers = parse_nextn(NEXTN) if settings.nextn is None else (settings.nextn,)
    params = sampling_params(sampling, settings, max_tokens=OUTPUT_LEN)
    sizes = parse_list("--concurrency", concurrency, int, "1,2,4,8")
    request = BenchRequest(
        Wanted(model, numbers, settings.drafter, sizes),
        Asked(dataset, num_requests, input_len, output_len, params),
        threads,
        out,
    )
    with progress("reading the checkpoint") as watch:
        reports = bench(request, watch)
    if len(reports) > 1:
        show_results(out / JSON, json, lambda: print_batches(reports), "pictures")
    else:
        show_results(out / JSON, json, lambda: print_report(reports[0]), "picture")
