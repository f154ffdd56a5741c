"""A benchmark as tables for people and as one JSON object for programs."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from mtpbuild.builder.bench.figures import (
    ALL,
    Figures,
    Row,
    disagreements,
    percentile,
    recommendation,
)
from mtpbuild.builder.bench.measure import Measured, intervals
from mtpbuild.builder.plan import Nextn
from mtpbuild.builder.show.tables import figures_table, say

PERCENTILES = (50, 90, 99)
PANELS: dict[str, Callable[[Figures], float]] = {
    "tokens/s of all users": lambda f: f.throughput,
    "tokens/s per user": lambda f: f.tokens_per_s,
}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The results of one run of `mtpbuild bench`."""

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    engines: dict[Nextn, str]  # folder by nextn
    rows: list[Row]
    measured: dict[Nextn, Measured]


def to_json(report: Benchmark) -> dict[str, Any]:
    """Make the JSON that docs/bench.md describes, with the keys of `vllm bench serve`."""
    best, text = recommendation(report.rows)
    return {
        "model": report.model,
        "machine": report.machine,
        "settings": report.settings,
        "same_output_expected": differs(report.settings) is None,
        "recommended_nextn": best,
        "recommendation": text,
        "results": [
            {
                "nextn": row.nextn,
                "drafter": row.drafter,
                "engine": report.engines[row.nextn],
                **keys(row, row.overall),
                "kinds": {k: keys(row, f) for k, f in row.kinds.items() if k != ALL},
                "requests": list(_requests(report.measured[row.nextn])),
            }
            for row in report.rows
        ],
    }


def to_batches_json(reports: Sequence[Benchmark]) -> dict[str, Any]:
    """Make the JSON of several concurrencies; `runs` has the JSON of each alone."""
    return {
        "batches": [
            {
                "concurrency": report.settings["concurrency"],
                "nextn": row.nextn,
                "output_throughput": row.overall.throughput,
                "user_tokens_per_s": row.overall.tokens_per_s,
                "speedup": asdict(row.overall.speedup),
            }
            for report in reports
            for row in report.rows
        ],
        "runs": [to_json(report) for report in reports],
    }


def to_rows(reports: Sequence[Benchmark]) -> Iterator[dict[str, Any]]:
    """List a table's rows: the figures of each concurrency, nextn and kind of prompt."""
    for report in reports:
        for row in report.rows:
            for kind, figures in row.kinds.items():
                yield {
                    "concurrency": report.settings["concurrency"],
                    "nextn": row.nextn,
                    "drafter": row.drafter,
                    "kind": kind,
                    **keys(row, figures),
                }


def differs(settings: dict[str, Any]) -> str | None:
    """Return why a correct engine's outputs may differ from nextn 0's; None if they must not."""
    sampling = settings["sampling"]
    if sampling["rejection_sample_method"] == "synthetic":
        return "synthetic: drafts are accepted by chance; the texts and the speed are not real"
    if sampling["temperature"] > 0 and sampling["acceptance"] == "rejection":
        return "rejection: the distribution of nextn 0, not its text; equal outputs are by chance"
    if sampling["relaxed_topk"] > 1:
        return "relaxed: within <think> the text may differ from nextn 0's, which is strict"
    return None


def keys(row: Row, figures: Figures) -> dict[str, Any]:
    """List the figures of one nextn and one kind of prompt."""
    drafting, f = figures.drafting, figures
    rate, length = drafting.draft_acceptance_rate, drafting.mean_acceptance_length
    result: dict[str, Any] = {
        "completed": f.requests,
        "total_input_tokens": f.input_tokens,
        "total_output_tokens": f.output_tokens,
        "duration": f.duration,
        "request_throughput": f.requests / f.duration,
        "output_throughput": f.throughput,
    }
    for name, seconds in (("ttft", f.ttft), ("tpot", f.tpot), ("itl", f.itl), ("e2el", f.e2el)):
        for key, value in spread(seconds).items():
            result[f"{key}_{name}_ms"] = 1000 * value
    return result | {
        "spec_decode_acceptance_length": length,
        "spec_decode_acceptance_rate": None if rate is None else 100 * rate,
        "spec_decode_per_position_acceptance_rates": drafting.per_position_acceptance_rates,
        "spec_decode_num_drafts": drafting.num_spec_steps,
        "spec_decode_draft_tokens": drafting.num_draft_tokens,
        "spec_decode_accepted_tokens": drafting.num_accepted_draft_tokens,
        "user_tokens_per_s": f.tokens_per_s,
        "tokens_per_step": f.tokens_per_step,
        "speedup": asdict(f.speedup),
        "predicted_speedup": f.predicted,
        "step_ms": 1000 * row.cost.step,
        "verify_step_ms": None if row.cost.verify is None else 1000 * row.cost.verify,
        "verify_cost": row.cost.v,
        "draft_cost": row.cost.d,
        "draft_share": row.cost.draft_share,
        "same_output_as_nextn_0": f.same_output,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
        **{f"p{percent}": percentile(values, percent) for percent in PERCENTILES},
    }


def _requests(measured: Measured) -> Iterator[dict[str, Any]]:
    """List, for each request, the numbers from which the figures can be computed again."""
    for group in measured.groups:
        for s in group:
            assert s.drafting is not None
            yield {
                "kind": s.prompt.kind,
                "task_id": s.prompt.task_id,
                "input_tokens": len(s.prompt.token_ids),
                "output_tokens": len(s.token_ids),
                "ttft_ms": 1000 * (s.times[0] - s.begun),
                "e2el_ms": 1000 * (s.times[-1] - s.begun),
                "steps": len(s.times),
                "itl_ms": [round(1000 * seconds, 4) for seconds in intervals(s)],
                "acceptance_histogram": s.drafting.acceptance_histogram,
            }


def lines(nextn: int) -> dict[str, str]:
    """Return the table's lines as templates of `keys`; nextn 0 to 4 must fit in 80 columns."""
    rate = "{{spec_decode_per_position_acceptance_rates[{}]:.2f}}"
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


def cell(template: str, figures: dict[str, Any]) -> str:
    try:
        return template.format(**figures).replace("%", " %")
    except TypeError:  # the figure is None
        return "-"
    except IndexError:  # the row drafts fewer positions
        return ""


def table(report: Benchmark, kind: str) -> Table:
    """Make a table with a column per nextn."""
    result = figures_table("nextn", (row.nextn for row in report.rows))
    result.add_row("drafter", *((row.drafter or "-").removeprefix("mtp-") for row in report.rows))
    columns = []
    for row in report.rows:
        figures = row.kinds[kind]
        interval = figures.speedup.interval if row.nextn else "-"
        columns.append({**keys(row, figures), "interval": interval})
    for name, template in lines(max(row.most for row in report.rows)).items():
        result.add_row(name, *(cell(template, column) for column in columns))
    return result


def _title(report: Benchmark, kind: str) -> str:
    figures = report.rows[0].kinds[kind]
    requests = "1 request" if figures.requests == 1 else f"{figures.requests} requests"
    return (
        f"\n{report.model}, {kind}: {requests}, "
        f"{figures.input_tokens} prompt and {figures.output_tokens} output tokens, "
        f"concurrency {report.settings['concurrency']}"
    )


def machine_line(m: dict[str, Any]) -> str:
    threads = f"{m['threads']} threads" if m["threads"] else "threads as onnxruntime chooses"
    load = f", load {m['load_average'][0]:.1f} at the start" if m["load_average"] else ""
    return f"{m['cpu']}, {m['cores']} cores, {threads}{load}"


def print_report(report: Benchmark) -> None:
    """Print a table per kind of prompt, one for all, the machine, and which nextn to choose."""
    kinds = list(report.rows[0].kinds)
    for kind in [*kinds[1:], ALL] if len(kinds) > 2 else kinds[1:]:
        say(_title(report, kind), style="bold")
        say(table(report, kind))
    say(differs(report.settings), f"\n{machine_line(report.machine)}", disagreements(report.rows))
    say(recommendation(report.rows)[1], style="bold")


def batches_table(reports: Sequence[Benchmark], name: str) -> Table:
    """Make a table with a line per concurrency and a column per nextn."""
    result = figures_table(name, (f"nextn {row.nextn}" for row in reports[0].rows))
    for report in reports:
        cells = (f"{PANELS[name](row.overall):.1f}" for row in report.rows)
        result.add_row(f"concurrency {report.settings['concurrency']}", *cells)
    return result


def print_batches(reports: Sequence[Benchmark]) -> None:
    """Print both tables, the machine, and which nextn to choose at each concurrency."""
    first = reports[0]
    say(f"\n{first.model}: {first.settings['num_requests']} requests", style="bold")
    say(*(batches_table(reports, name) for name in PANELS))
    say(differs(first.settings), f"\n{machine_line(first.machine)}")
    for report in reports:
        best = recommendation(report.rows)[1]
        say(f"concurrency {report.settings['concurrency']}: {best}", style="bold")
