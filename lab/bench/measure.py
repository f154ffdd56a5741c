"""Runs of the engines in turn, group by group, and of steps after the same contexts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mtpbuild.builder.garbage import pause_garbage_collection
from mtpbuild.builder.plan.plan import Nextn
from mtpbuild.builder.stages import Watch, ignore
from mtpbuild.lab.measure import runs
from mtpbuild.lab.measure.prompts import Group
from mtpbuild.runtime.engine.engine import Engine

WARM_UP_TOKENS = 32
TIMED_STEPS = 16  # per context, of an engine and of its verifier
STEPS = runs.SETTLING_STEPS + 1 + TIMED_STEPS


@dataclass(frozen=True, slots=True)
class Contender:
    """The engine of one nextn, and its verifier, which drafts nothing."""

    nextn: Nextn
    drafter: str | None
    engine: Engine
    verifier: Engine | None = None

    def adapt(self, group: Group) -> Group:
        """Make nextn 0's requests strict: without drafts, other acceptance only costs time."""
        return runs.change_params(group, **runs.STRICT) if self.nextn == 0 else group


@dataclass(slots=True)
class Measurements:
    """The measurements of a contender."""

    groups: list[list[runs.TimedAnswer]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # seconds, after the same contexts as `verify`
    verify: list[float] = field(default_factory=list)  # of the verifier's steps


def measure(
    contenders: Sequence[Contender], groups: Sequence[Group], watch: Watch = ignore
) -> dict[Nextn, Measurements]:
    """Measure each nextn; the timed steps follow texts of the first contender, nextn 0."""
    measured = {contender.nextn: Measurements() for contender in contenders}
    capacity = contenders[0].engine.manifest.build.max_seq_len
    max_length = capacity - STEPS * max(c.engine.manifest.window for c in contenders)
    warm_up_engines(contenders, groups[0])
    with pause_garbage_collection():
        for i, group in enumerate(groups):
            at_once = f", {len(group)} at once" if len(group) > 1 else ""
            watch(f"request {i * len(group) + 1} of {len(groups) * len(group)}{at_once}")
            for contender in runs.rotate(contenders, i):
                answers = runs.run_settled(contender.engine, contender.adapt(group))
                measured[contender.nextn].groups.append(answers)
            baseline = measured[contenders[0].nextn].groups[-1]
            contexts = make_contexts(group, baseline, (i + 0.5) / len(groups), max_length)
            for contender in runs.rotate(contenders, i):
                time_steps(contender, contender.adapt(contexts), measured[contender.nextn])
    return measured


def time_steps(contender: Contender, contexts: Group, measured: Measurements) -> None:
    """Time a few steps of the engine, then of its verifier, after the same contexts."""
    pairs = ((contender.engine, measured.steps), (contender.verifier, measured.verify))
    for engine, seconds in pairs:
        if engine is not None:
            for answer in runs.run_group(engine, runs.make_endless(contexts), STEPS):
                seconds += answer.intervals[runs.SETTLING_STEPS :]


def make_contexts(
    group: Group, baseline: Sequence[runs.TimedAnswer], part: float, max_length: int
) -> Group:
    """Extend each prompt by the first `part` of its answer, to `max_length` tokens at most."""
    return [
        replace(p, token_ids=(p.token_ids + text[: int(part * len(text))])[: max(max_length, 1)])
        for p, text in zip(group, (answer.token_ids for answer in baseline), strict=True)
    ]


def warm_up_engines(contenders: Sequence[Contender], group: Group) -> None:
    """Run every engine once, so that memory is touched, kernels are chosen and clocks are up."""
    for contender in contenders:
        for engine in filter(None, (contender.engine, contender.verifier)):
            runs.run_group(engine, runs.make_endless(group, WARM_UP_TOKENS))
