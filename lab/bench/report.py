"""A benchmark as tables and pictures for people and as one JSON object for programs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtpbuild.builder.plan.plan import Nextn
from mtpbuild.lab.bench.figures import (
    PER_POSITION,
    NextnResult,
    find_disagreements,
    recommend_nextn,
)
from mtpbuild.lab.measure.statistics import ALL, PERCENTILES
from mtpbuild.lab.show.pictures import Line, Panel, Picture, write_machine_note
from mtpbuild.runtime.contract.rules import BUILT_IN
from mtpbuild.runtime.tables import Row, print_lines, print_table

THROUGHPUTS = {
    "tokens/s of all users": "output_throughput",
    "tokens/s per user": "user_tokens_per_s",
}
NEXTN = "nextn (draft tokens per step)"
BARS = 40  # of a histogram


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The results of one run of `mtpbuild bench` at one concurrency."""

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    engines: dict[Nextn, str]  # folder by nextn
    rows: list[NextnResult]

    @property
    def concurrency(self) -> int:
        return int(self.settings["concurrency"])


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
                "requests": row.requests,
            }
            for row in report.rows
        ],
    }


def make_json(reports: Sequence[Benchmark]) -> dict[str, Any]:
    """Make the JSON of one concurrency, or of several; `runs` has the JSON of each alone."""
    if len(reports) == 1:
        return make_bench_json(reports[0])
    return {
        "batches": [
            {
                "concurrency": report.concurrency,
                "nextn": row.nextn,
                **{key: row.overall[key] for key in (*THROUGHPUTS.values(), "speedup")},
            }
            for report in reports
            for row in report.rows
        ],
        "runs": [make_bench_json(report) for report in reports],
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


def list_lines(max_drafts: int) -> dict[str, str]:
    """List the table's lines as templates of the figures; five nextn fit in 80 columns."""
    rate = f"{{{{{PER_POSITION}[{{}}]:.2f}}}}"
    return {
        "tokens/s per user": "{user_tokens_per_s:.1f}",
        "speedup over nextn 0": "{speedup[value]:.2f}x",
        "  95 % interval": "{interval}",
        "  predicted, L / (v + d)": "{predicted_speedup:.2f}x",
        "acceptance length": "{spec_decode_acceptance_length:.2f}",
        "  L: first step left out": "{tokens_per_step:.2f}",
        **{f"  accepted at position {i + 1}": rate.format(i) for i in range(max_drafts)},
        "v: verify / nextn 0's step": "{verify_cost:.2f}",
        "d: draft / nextn 0's step": "{draft_cost:z.2f}",
        "ms per step, median": "{median_itl_ms:.2f}",
        "  drafting's share": "{draft_share:z.0%}",
        **{f"ms per output token, p{p}": f"{{p{p}_tpot_ms:.2f}}" for p in PERCENTILES},
        "ms to first token, p50": "{median_ttft_ms:.2f}",
        "tokens/s of all users": "{output_throughput:.1f}",
        "same output as nextn 0": "{same_output_as_nextn_0} of {completed}",
    }


def list_rows(report: Benchmark, kind: str) -> Iterator[Row]:
    """List the rows of a table with a line per figure and a column per nextn."""

    def format_cell(template: str, row: NextnResult) -> str:
        interval = row.speedup(kind).interval if row.nextn else "-"
        try:
            return template.format(**row.kinds[kind], interval=interval).replace("%", " %")
        except TypeError:  # the figure is None
            return "-"
        except IndexError:  # the row drafts fewer positions
            return ""

    rows = report.rows
    yield "nextn", *(str(row.nextn) for row in rows)
    yield "drafter", *((row.drafter or "-").removeprefix("mtp-") for row in rows)
    for name, template in list_lines(max(row.max_drafts for row in report.rows)).items():
        yield name, *(format_cell(template, row) for row in rows)


def describe_load(machine: dict[str, Any]) -> str:
    threads = machine["threads"]
    loads = machine["load_average"]
    text = f"{machine['cpu']}, {machine['cores']} cores, "
    text += f"{threads} threads" if threads else "threads by default (--threads auto)"
    return text + (f", load {loads[0]:.1f} at the start" if loads else "")


def print_benchmark(report: Benchmark) -> None:
    """Print a table per kind of prompt, one for all, the machine, and which nextn to choose."""
    _, *kinds = report.rows[0].kinds
    for kind in [*kinds, ALL] if len(kinds) > 1 else kinds:
        figures = report.rows[0].kinds[kind]
        plural = "s" if figures["completed"] > 1 else ""
        counts = "{completed} request{s}, {total_input_tokens} prompt and {total_output_tokens} "
        counts = counts.format(**figures, s=plural) + "output tokens"
        title = f"\n{report.model}, {kind}: {counts}, concurrency {report.concurrency}"
        print_lines(title, style="bold")
        print_table(list_rows(report, kind))
    print_lines(
        explain_output_difference(report.settings),
        f"\n{describe_load(report.machine)}",
        find_disagreements(report.rows),
    )
    print_lines(recommend_nextn(report.rows)[1], style="bold")


def print_benchmarks(reports: Sequence[Benchmark]) -> None:
    """Print one report in full, or compare several and recommend a nextn for each concurrency."""
    first, *others = reports
    if not others:
        print_benchmark(first)
        return
    print_lines(f"\n{first.model}: {first.settings['num_requests']} requests", style="bold")
    for name, key in THROUGHPUTS.items():
        rows = [
            (f"concurrency {report.concurrency}", *(f"{r.overall[key]:.1f}" for r in report.rows))
            for report in reports
        ]
        print_table([(name, *(f"nextn {row.nextn}" for row in first.rows)), *rows])
    print_lines(explain_output_difference(first.settings), f"\n{describe_load(first.machine)}")
    for report in reports:
        best = recommend_nextn(report.rows)[1]
        print_lines(f"concurrency {report.concurrency}: {best}", style="bold")


def list_pictures(reports: Sequence[Benchmark]) -> dict[str, Picture]:
    """List the pictures of the first concurrency by name, and one that compares several."""
    pictures = {"bench": plot_speedups(reports[0]), "bench_steps": plot_steps(reports[0])}
    if len(reports) > 1:
        pictures["bench_batches"] = plot_batches(reports)
    return pictures


def plot_speedups(report: Benchmark) -> Picture:
    """Plot speedups and acceptance lengths over nextn."""
    rows = report.rows
    speedups = list[Line]()
    lengths = list[Line]()
    for kind in [kind for kind in rows[0].kinds if kind != ALL]:
        figures = [row.kinds[kind] for row in rows]
        ratios = [row.speedup(kind) for row in rows]
        predicted = [f["predicted_speedup"] or math.nan for f in figures]
        speedups += [
            Line(kind, ratios, notes=[f"{ratio.value:.2f}" for ratio in ratios]),
            Line("predicted: L / (v + d)", predicted, look="_"),
        ]
        lengths.append(Line(kind, [f["spec_decode_acceptance_length"] or 1 for f in figures]))
    lengths.append(Line("all drafts accepted", [row.max_drafts + 1 for row in rows], look=":"))
    ticks = [row.nextn for row in rows]
    panels = [
        Panel(NEXTN, "speedup over nextn 0", speedups, ticks),
        Panel(NEXTN, "acceptance length (tokens per step)", lengths, ticks),
    ]
    return Picture(f"{report.model}: what MTP gives", write_machine_note(report.machine), panels)


def plot_steps(report: Benchmark) -> Picture:
    """Plot how long steps took, and how often drafts were accepted at each position."""
    times = list[Line]()
    rates = list[Line]()
    steps = [np.concatenate([r["itl_ms"] for r in row.requests]) for row in report.rows]
    longest = float(np.percentile(np.concatenate(steps), 99))
    for row, ms in zip(report.rows, steps, strict=True):
        name = f"nextn {row.nextn}"
        counts, edges = np.histogram(ms.clip(max=longest), BARS, (0, longest))
        times.append(Line(name, [*counts / len(ms)], [*edges[:-1]], look="-"))
        rates.append(Line(name, row.overall[PER_POSITION], range(1, row.max_drafts + 1)))
    drafts = range(1, max(row.max_drafts for row in report.rows) + 1)
    options = {"ylim": (0, 1.02), "xticks": drafts}
    panels = [
        Panel("ms per step (the last: 99th percentile and above)", "share of steps", times),
        Panel("draft of a step", "share of steps that accepted it", rates, options=options),
    ]
    return Picture(f"{report.model}: step by step", write_machine_note(report.machine), panels)


def plot_batches(reports: Sequence[Benchmark]) -> Picture:
    """Plot a line per nextn over the concurrency."""
    first = reports[0]
    sizes = [report.concurrency for report in reports]
    panels = [
        Panel(
            "concurrency (requests at once)",
            name,
            [
                Line(f"nextn {row.nextn}", [report.rows[i].overall[key] for report in reports])
                for i, row in enumerate(first.rows)
            ],
            sizes,
            {"ylim": (0, None)},
        )
        for name, key in THROUGHPUTS.items()
    ]
    title = f"{first.model}: tokens/s against the batch"
    return Picture(title, write_machine_note(first.machine), panels)
