"""Counts of accepted drafts by their number in a step, position, margin and entropy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mtpbuild.builder.eval.figures import wilson
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.trace.lines import TaskId, TraceFile

BINS = 8
BY = ("draft", "position", "margin", "entropy")


@dataclass(frozen=True, slots=True)
class Judged:
    """A draft that a step judged; drafts after the first rejected one are not judged."""

    task_id: TaskId
    step: int
    draft: int  # 1 for the first of its step
    position: int  # of the drafted token, among prompt and output
    accepted: bool
    margin: float | None  # None for an infinite one
    entropy: float | None  # of the target, in nats; None if the trace has none


@dataclass(frozen=True, slots=True)
class Bin:
    """The drafts whose value lies between `low` and `high`, both included."""

    low: float
    high: float
    mean: float
    judged: int
    accepted: int

    @property
    def share(self) -> float:
        return self.accepted / self.judged

    @property
    def interval(self) -> tuple[float, float]:
        """Return the share's 95 % interval."""
        return wilson(self.accepted, self.judged)


@dataclass(frozen=True, slots=True)
class Studied:
    """The drafts of one trace, and bins by each of `BY` that the trace records."""

    trace: TraceFile
    drafts: list[Judged]
    bins: dict[str, list[Bin]]


def studied(trace: TraceFile) -> Studied:
    drafts = [*judged(trace)]
    if not drafts:
        raise UsageError(f"{trace.path}: no drafts in it: its engine drafts nothing")
    bins = {}
    for name in BY:
        values = [(getattr(draft, name), draft.accepted) for draft in drafts]
        if known := [(value, accepted) for value, accepted in values if value is not None]:
            bins[name] = binned(known)
    return Studied(trace, drafts, bins)


def judged(trace: TraceFile) -> Iterator[Judged]:
    """List the drafts of a trace that were judged."""
    for task_id, request in trace.requests.items():
        for step, row in request.rows():
            if row < step.num_drafts:
                yield Judged(
                    task_id=task_id,
                    step=step.step,
                    draft=row + 1,
                    position=step.position + 1 + row,
                    accepted=row < step.n - 1,
                    margin=step.margins[row],
                    entropy=step.entropies[row] if step.entropies else None,
                )


def binned(points: Sequence[tuple[float, bool]]) -> list[Bin]:
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
