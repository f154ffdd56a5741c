"""A benchmark as tables for people and as one JSON object for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from mtpbuild.builder.plan.plan import Nextn
from mtpbuild.lab.bench.figures import (
    PER_POSITION,
    NextnResult,
    find_disagreements,
    recommend_nextn,
)
from mtpbuild.lab.bench.measure import Measurements
from mtpbuild.lab.measure.statistics import ALL, PERCENTILES
from mtpbuild.lab.show.tables import make_figures_table, print_lines
from mtpbuild.runtime.contract.rules import BUILT_IN

PANELS = {"tokens/s of all users": "output_throughput", "tokens/s per user": "user_tokens_per_s"}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The results of one run of `mtpbuild bench`."""

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    engines: dict[Nextn, str]  # folder by nextn
    rows: list[NextnResult]
    measured: dict[Nextn, Measurements]


def make_bench_json(report: Benchmark) -> dict[str, Any]:
    """Make the JSON that docs/bench.md describes, with the keys of `vllm bench serve`."""
    best, text = recommend_nextn(report.rows)
    return {
        "model": report.model,
        "machine": report.machine,
        "settings": report.settings,
        "same_output_expected": explain_output_difference(report.settings) is None,
        "recommended_nextn": best,
        "recommendation": text,
        "results": [
            {
                "nextn": row.nextn,
                "drafter": row.drafter,
                "engine": report.engines[row.nextn],
                **row.overall,
                "kinds": {k: f for k, f in row.kinds.items() if k != ALL},
                "requests": list(_list_requests(report.measured[row.nextn])),
            }
            for row in report.rows
        ],
    }


def make_batches_json(reports: Sequence[Benchmark]) -> dict[str, Any]:
    """Make the JSON of several concurrencies; `runs` has the JSON of each alone."""
    return {
        "batches": [
            {
                "concurrency": report.settings["concurrency"],
                "nextn": row.nextn,
                **{key: row.overall[key] for key in (*PANELS.values(), "speedup")},
            }
            for report in reports
            for row in report.rows
        ],
        "runs": [make_bench_json(report) for report in reports],
    }


def list_csv_rows(reports: Sequence[Benchmark]) -> Iterator[dict[str, Any]]:
    """List the CSV's rows: the figures of each concurrency, nextn and kind of prompt."""
    for report in reports:
        for row in report.rows:
            for kind, figures in row.kinds.items():
                yield {
                    "concurrency": report.settings["concurrency"],
                    "nextn": row.nextn,
                    "drafter": row.drafter,
                    "kind": kind,
                    **figures,
                }


def explain_output_difference(settings: dict[str, Any]) -> str | None:
    """Return why an engine's correct outputs may differ from nextn 0's; None if they must not."""
    sampling = settings["sampling"]
    if sampling["rejection_sample_method"] == "synthetic":
        return "synthetic: drafts are accepted by chance; the texts and the speed are not real"
    if sampling["temperature"] > 0 and sampling["acceptance"] == "rejection":
        return "rejection: the distribution of nextn 0, not its text; equal outputs are by chance"
    if (rule := sampling["acceptance"]) not in BUILT_IN:
        return f"{rule}: a rule of another package; nextn 0 is strict, and its text may differ"
    if sampling["relaxed_topk"] > 1:
        return "relaxed: within <think> the text may differ from nextn 0's, which is strict"
    return None


def _list_requests(measured: Measurements) -> Iterator[dict[str, Any]]:
    """List, for each request, the numbers from which the figures can be computed again."""
    for group in measured.groups:
        for a in group:
            yield {
                "kind": a.prompt.kind,
                "task_id": a.prompt.task_id,
                "input_tokens": len(a.prompt.token_ids),
                "output_tokens": len(a.token_ids),
                "ttft_ms": 1000 * (a.times[0] - a.submitted),
                "e2el_ms": 1000 * (a.times[-1] - a.submitted),
                "steps": len(a.times),
                "itl_ms": [round(1000 * seconds, 4) for seconds in a.intervals],
                "acceptance_histogram": a.drafting.acceptance_histogram,
            }


def make_lines(nextn: int) -> dict[str, str]:
    """Return the table's lines as templates of the figures; five nextn fit in 80 columns."""
    rate = f"{{{{{PER_POSITION}[{{}}]:.2f}}}}"
    return {
        "tokens/s per user": "{user_tokens_per_s:.1f}",
        "speedup over nextn 0": "{speedup[value]:.2f}x",
        "  95 % interval": "{interval}",
        "  predicted, L / (v + d)": "{predicted_speedup:.2f}x",
        "acceptance length": "{spec_decode_acceptance_length:.2f}",
        "  L: first step left out": "{tokens_per_step:.2f}",
        **{f"  accepted at position {i + 1}": rate.format(i) for i in range(nextn)},
        "v: verify / nextn 0's step": "{verify_cost:.2f}",
        "d: draft / nextn 0's step": "{draft_cost:z.2f}",
        "ms per step, median": "{median_itl_ms:.2f}",
        "  drafting's share": "{draft_share:z.0%}",
        **{f"ms per output token, p{p}": f"{{p{p}_tpot_ms:.2f}}" for p in PERCENTILES},
        "ms to first token, p50": "{median_ttft_ms:.2f}",
        "tokens/s of all users": "{output_throughput:.1f}",
        "same output as nextn 0": "{same_output_as_nextn_0} of {completed}",
    }


def format_cell(template: str, figures: dict[str, Any]) -> str:
    try:
        return template.format(**figures).replace("%", " %")
    except TypeError:  # the figure is None
        return "-"
    except IndexError:  # the row drafts fewer positions
        return ""


def make_table(report: Benchmark, kind: str) -> Table:
    """Make a table with a column per nextn."""
    result = make_figures_table("nextn", (row.nextn for row in report.rows))
    result.add_row("drafter", *((row.drafter or "-").removeprefix("mtp-") for row in report.rows))
    columns = [
        row.kinds[kind] | {"interval": row.speedup(kind).interval if row.nextn else "-"}
        for row in report.rows
    ]
    for name, template in make_lines(max(row.most for row in report.rows)).items():
        result.add_row(name, *(format_cell(template, column) for column in columns))
    return result


def _make_title(report: Benchmark, kind: str) -> str:
    figures = report.rows[0].kinds[kind]
    requests = "{completed} request" + ("s" if figures["completed"] > 1 else "")
    counts = requests + ", {total_input_tokens} prompt and {total_output_tokens} output tokens"
    return (
        f"\n{report.model}, {kind}: {counts.format(**figures)}, "
        f"concurrency {report.settings['concurrency']}"
    )


def describe_load(m: dict[str, Any]) -> str:
    threads = f"{m['threads']} threads" if m["threads"] else "threads as onnxruntime chooses"
    load = f", load {m['load_average'][0]:.1f} at the start" if m["load_average"] else ""
    return f"{m['cpu']}, {m['cores']} cores, {threads}{load}"


def print_benchmark(report: Benchmark) -> None:
    """Print a table per kind of prompt, one for all, the machine, and which nextn to choose."""
    kinds = list(report.rows[0].kinds)
    for kind in [*kinds[1:], ALL] if len(kinds) > 2 else kinds[1:]:
        print_lines(_make_title(report, kind), style="bold")
        print_lines(make_table(report, kind))
    print_lines(
        explain_output_difference(report.settings),
        f"\n{describe_load(report.machine)}",
        find_disagreements(report.rows),
    )
    print_lines(recommend_nextn(report.rows)[1], style="bold")


def make_batches_table(reports: Sequence[Benchmark], name: str) -> Table:
    """Make a table with a line per concurrency and a column per nextn."""
    result = make_figures_table(name, (f"nextn {row.nextn}" for row in reports[0].rows))
    for report in reports:
        cells = (f"{row.overall[PANELS[name]]:.1f}" for row in report.rows)
        result.add_row(f"concurrency {report.settings['concurrency']}", *cells)
    return result


def print_benchmarks(reports: Sequence[Benchmark]) -> None:
    """Print one report in full, or compare several and recommend a nextn for each concurrency."""
    first = reports[0]
    if len(reports) == 1:
        print_benchmark(first)
        return
    print_lines(f"\n{first.model}: {first.settings['num_requests']} requests", style="bold")
    print_lines(*(make_batches_table(reports, name) for name in PANELS))
    print_lines(explain_output_difference(first.settings), f"\n{describe_load(first.machine)}")
    for report in reports:
        best = recommend_nextn(report.rows)[1]
        print_lines(f"concurrency {report.settings['concurrency']}: {best}", style="bold")
