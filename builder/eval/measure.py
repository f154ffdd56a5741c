"""Asks every problem under every setting, in turn, on one engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtpbuild.builder.bench import measure
from mtpbuild.builder.bench.measure import SETTLING_STEPS, Sample, endless, rotated, run_together
from mtpbuild.builder.eval.problems import Problem, answer_of
from mtpbuild.builder.garbage import no_garbage_collection
from mtpbuild.runtime import Engine


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to accept drafts: what it changes in a request."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)


STRICT = Setting("strict", measure.STRICT)
REJECTION = Setting("rejection", {"acceptance": "rejection"})


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a problem under a setting."""

    problem: Problem
    answer: str | None  # None: it was still thinking at the last token
    sample: Sample

    @property
    def right(self) -> bool:
        return self.answer == self.problem.answer


def relaxed(topk: int, delta: float) -> Setting:
    return Setting(f"{topk} / {delta:g}", {"relaxed_topk": topk, "relaxed_delta": delta})


def ask(
    engine: Engine,
    problems: Sequence[Problem],
    settings: Sequence[Setting],
    watch: Callable[[int], None] = lambda done: None,
) -> dict[str, list[Answered]]:
    """By setting, in the order of the problems. The settings take turns at being first."""
    answered: dict[str, list[Answered]] = {setting.name: [] for setting in settings}
    with no_garbage_collection():
        for i, problem in enumerate(problems):
            watch(i)
            for setting in rotated(settings, i):
                prompt = problem.prompt
                own = replace(prompt, params=replace(prompt.params, **setting.changes))
                run_together(engine, endless([own]), SETTLING_STEPS)  # another program ran
                (sample,) = run_together(engine, [own])
                answer = answer_of(sample.token_ids, prompt.token_ids, engine)
                answered[setting.name].append(Answered(problem, answer, sample))
    return answered
