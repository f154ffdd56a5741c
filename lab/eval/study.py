"""`mtpbuild study`: which drafts were accepted, from traces, by their place and certainty."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from mtpbuild.lab.measure.statistics import Estimate, estimate_share
from mtpbuild.lab.show.pictures import Line, Panel, Picture
from mtpbuild.lab.show.results import check_writable, write_results
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.tables import print_lines, print_table
from mtpbuild.runtime.trace.lines import TaskId, TraceFile, read_trace

BINS = 8
AXES = {  # by the field of `JudgedDraft` that drafts are binned by
    "draft": "draft of a step",
    "position": "position in the context",
    "greedy_margin": "margin of a greedy target, logits",
    "sampled_margin": "margin of a sampled target, of its CDF",
    "entropy": "entropy of the target, nats",
    "probability": "probability of the draft by the model",
    "rank": "rank of the draft by the model",
    "q": "probability of the draft by the drafter",
}


@dataclass(frozen=True, slots=True)
class JudgedDraft:
    """A draft that a step judged; drafts after the first rejected one are not judged."""

    task_id: TaskId
    step: int
    draft: int  # 1 for the first of its step
    position: int  # of the drafted token, among prompt and output
    accepted: bool
    # Of the target: the gap between the best two logits, or the distance of the drawn number to
    # the border of the token's cell. They have no common scale, so one of them is None.
    greedy_margin: float | None
    sampled_margin: float | None
    entropy: float | None  # of the target, in nats
    # Of the draft, by the model's plain softmax, and by the distribution that it was drawn from.
    # Older traces, and those of `run` without --logprobs, have none of these.
    probability: float | None
    rank: int | None
    q: float | None  # None if it was not drawn


@dataclass(frozen=True, slots=True)
class Bin:
    """The drafts whose margin (or another of `AXES`) is from `low` to `high`, both included."""

    low: float
    high: float
    mean: float
    judged: int
    accepted: int

    @property
    def share(self) -> Estimate:
        return estimate_share(self.accepted, self.judged)

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the table: the range, the count, the share and its interval."""
        ends = dict.fromkeys(f"{end:.4g}" for end in (self.low, self.high))
        share = self.share
        shares = f"{100 * share.value:.1f} %", f"{share.low:.0%}-{share.high:.0%}"
        return " to ".join(ends), str(self.judged), *shares


@dataclass(frozen=True, slots=True)
class TraceStudy:
    """The drafts of one trace, and bins by each of `AXES` that the trace records."""

    trace: TraceFile
    drafts: list[JudgedDraft]
    bins: dict[str, list[Bin]]

    @property
    def accepted(self) -> int:
        return sum(draft.accepted for draft in self.drafts)


def study(paths: Sequence[Path], out: Path) -> list[TraceStudy]:
    """Read traces and write study.json and study.csv; raise UsageError."""
    check_writable(out)
    studies = [study_trace(read_trace(path)) for path in paths]
    write_results(out, "study", {"traces": [make_study_json(study) for study in studies]})
    with (out / "study.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["trace", *(column.name for column in fields(JudgedDraft))])
        writer.writeheader()
        for study in studies:
            writer.writerows({"trace": study.trace.path, **asdict(draft)} for draft in study.drafts)
    return studies


def study_trace(trace: TraceFile) -> TraceStudy:
    drafts = [*list_judged_drafts(trace)]
    if not drafts:
        raise UsageError(f"{trace.path} has no drafts: its engine drafts nothing")
    known = {
        name: [(value, d.accepted) for d in drafts if (value := getattr(d, name)) is not None]
        for name in AXES
    }
    bins = {name: make_bins(points) for name, points in known.items() if points}
    return TraceStudy(trace, drafts, bins)


def list_judged_drafts(trace: TraceFile) -> Iterator[JudgedDraft]:
    """List the drafts of a trace that were judged."""
    for task_id, request in trace.requests.items():
        for step, row in request.rows():
            if row < step.num_drafts:
                margin = step.margins[row]
                greedy = request.request.greedy
                yield JudgedDraft(
                    task_id=task_id,
                    step=step.step,
                    draft=row + 1,
                    position=step.position + 1 + row,
                    accepted=row < step.n - 1,
                    greedy_margin=margin if greedy else None,
                    sampled_margin=None if greedy else margin,
                    entropy=step.entropies[row] if step.entropies else None,
                    probability=_exp(step.draft_logprobs[row]) if step.draft_logprobs else None,
                    rank=step.draft_ranks[row] if step.draft_ranks else None,
                    q=step.draft_q[row] if step.draft_q else None,
                )


def _exp(logprob: float | None) -> float:
    return 0.0 if logprob is None else math.exp(logprob)  # None stands for an infinity


def make_bins(points: Sequence[tuple[float, bool]]) -> list[Bin]:
    """Put points into a bin per value, or into at most `BINS` bins of similar counts."""
    values, accepted = np.array([x for x, _ in points], float), np.array([y for _, y in points])
    distinct = np.unique(values)
    if len(distinct) > BINS:
        distinct = np.unique(np.quantile(values, np.arange(BINS) / BINS, method="lower"))
    places = np.searchsorted(distinct, values, side="right") - 1
    bins = []
    for place in range(len(distinct)):
        mine, verdicts = values[places == place], accepted[places == place]
        counts = len(mine), int(verdicts.sum())
        bins.append(Bin(float(mine.min()), float(mine.max()), float(mine.mean()), *counts))
    return bins


def make_study_json(result: TraceStudy) -> dict[str, Any]:
    first = next(iter(result.trace.requests.values())).request
    return {
        "trace": str(result.trace.path),
        **{name: getattr(first, name) for name in ("model", "nextn", "drafter", "target")},
        "judged": len(result.drafts),
        "accepted": result.accepted,
        "by": {
            name: [asdict(b) | {"share": b.share.value, "interval": b.share[1:]} for b in bins]
            for name, bins in result.bins.items()
        },
    }


def print_study(studies: Sequence[TraceStudy]) -> None:
    """Print a table for each trace and each of its axes."""
    for study in studies:
        title = f"{study.trace.path}: {study.accepted} of {len(study.drafts)} judged drafts"
        print_lines(title, style="bold")
        for name, bins in study.bins.items():
            print_table([(AXES[name], "judged", "accepted", "95 %"), *(b.cells for b in bins)])
        if "entropy" not in study.bins:
            print_lines(
                "it has no entropies and probabilities: `mtpbuild run` with --json --logprobs 1 "
                "records them"
            )


def plot_study(studies: Sequence[TraceStudy]) -> Picture:
    """Plot the share of accepted drafts on each axis, a line per trace, with 95 % intervals."""
    panels = []
    for name, title in AXES.items():
        traces = {str(s.trace.path): bins for s in studies if (bins := s.bins.get(name))}
        lines = [
            Line(
                label,
                [b.share for b in bins],
                [b.mean for b in bins],
                notes=[f"{b.judged:,}" for b in bins],
            )
            for label, bins in traces.items()
        ]
        options: dict[str, Any] = {"ylim": (-0.06, 1.08)}  # with room for counts
        if not lines:
            options["title"] = "not in these traces"
        elif name == "rank":
            options["xscale"] = "log"
        elif name == "draft":
            options["xticks"] = sorted({int(b.low) for bins in traces.values() for b in bins})
        panels.append(Panel(title, "share accepted", lines, options=options))
    note = "of the drafts that were judged; a point: so many drafts of like values, 95 % interval"
    return Picture("accepted drafts", note, panels, columns=4)
