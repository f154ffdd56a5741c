"""The command `eval`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

from typer import Option

from mtpbuild.builder.cli.output import progress, show_results
from mtpbuild.runtime.cli import error_line
from mtpbuild.runtime.compat.flags import CompatFlags, read_flags
from mtpbuild.runtime.compat.settings import Settings, check_engine
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import grouped, parse_list
from mtpbuild.runtime.sampling_flags import SamplingFlags, sampling_params

T = TypeVar("T")
TOPK, DELTA = "2,5,10", "0.1,0.3,0.6"


@error_line
@grouped
def evaluate(
    engine: Annotated[Path, Option(help="Engine directory.")],
    sampling: SamplingFlags,
    compat: CompatFlags,
    task: Annotated[
        str, Option(help="reasoning, or a JSONL file with answers (docs/eval.md).")
    ] = "reasoning",
    num_problems: Annotated[
        int | None, Option(help="Default: 60 of the built-in ones, all of a file's.")
    ] = None,
    relaxed_topk: Annotated[
        str | None, Option(help=f"Values to try at temperature 0. Default: {TOPK}.")
    ] = None,
    relaxed_delta: Annotated[
        str | None, Option(help=f"Values to try with each of them. Default: {DELTA}.")
    ] = None,
    use_relaxed_acceptance_for_thinking: Annotated[
        bool,
        Option(
            "--use-relaxed-acceptance-for-thinking",
            help="TensorRT-LLM's; at temperature 0 it is always compared.",
        ),
    ] = False,
    threads: Annotated[int | None, Option(help="CPU threads; default: all cores.")] = None,
    out: Annotated[Path, Option(help="Folder for eval.json and eval.png.")] = Path("eval_results"),
    json: Annotated[bool, Option("--json", help="Print eval.json instead of the tables.")] = False,
) -> None:
    """Right answers and speed: strict against relaxed, or above temperature 0 against rejection."""
    from mtpbuild.builder.eval.evaluate import JSON, OUTPUT_TOKENS, EvalRequest, evaluate
    from mtpbuild.builder.eval.report import print_report
    from mtpbuild.runtime.manifest import read_manifest

    relaxing = [relaxed_topk, relaxed_delta, use_relaxed_acceptance_for_thinking or None]
    if sampling.temperature > 0 and relaxing != [None] * 3:
        raise UsageError("relaxed acceptance is for greedy requests: set --temperature to 0")
    if sampling.acceptance is not None:
        raise UsageError("--acceptance: eval compares strict with the others by itself")
    settings = read_flags(compat)
    check_engine(settings, read_manifest(engine).build)
    topk, delta = grid(relaxed_topk, relaxed_delta, settings)
    params = sampling_params(sampling, settings, max_tokens=OUTPUT_TOKENS)
    request = EvalRequest(engine, task, num_problems, topk, delta, params, threads, out)
    with progress("reading the engine") as watch:
        report = evaluate(request, watch)
    show_results(out / JSON, json, lambda: print_report(report), "picture")


def grid(
    topk: str | None, delta: str | None, settings: Settings
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The values to try are the flags', else the configuration's, else the usual ones."""
    on = settings.use_relaxed_acceptance_for_thinking
    topks = _tried("--relaxed-topk", topk, settings.relaxed_topk if on else None, int, TOPK)
    deltas = _tried("--relaxed-delta", delta, settings.relaxed_delta if on else None, float, DELTA)
    if min(topks) < 2 or not 0 <= min(deltas) <= max(deltas) <= 1:
        raise UsageError("--relaxed-topk is from 2 (1 is strict), --relaxed-delta in 0..1")
    return topks, deltas


def _tried(
    flag: str, typed: str | None, configured: T | None, kind: Callable[[str], T], usual: str
) -> tuple[T, ...]:
    if typed and configured is not None:
        raise UsageError(f"{flag} {typed} and the configuration's {configured}; drop one")
    if configured is not None:
        return (configured,)
    return tuple(dict.fromkeys(parse_list(flag, typed or usual, kind, usual)))
