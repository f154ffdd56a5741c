"""Asks every problem under every setting, in turn, on one engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtpbuild.builder.bench.measure import SETTLING_STEPS, Sample, endless, rotated, run_together
from mtpbuild.builder.eval.problems import Problem, answer_of
from mtpbuild.builder.garbage import no_garbage_collection
from mtpbuild.runtime import Engine

Settings = Mapping[str, dict[str, Any]]  # ways to accept drafts: what each changes in a request


@dataclass(frozen=True, slots=True)
class Answered:
    """One problem under one setting."""

    problem: Problem
    answer: str | None  # None: it was still thinking at the last token
    sample: Sample

    @property
    def right(self) -> bool:
        return self.answer == self.problem.answer


def ask(
    engine: Engine,
    problems: Sequence[Problem],
    settings: Settings,
    watch: Callable[[int], None] = lambda done: None,
) -> dict[str, list[Answered]]:
    """By setting, in the order of the problems. The settings take turns at being first."""
    answered: dict[str, list[Answered]] = {name: [] for name in settings}
    with no_garbage_collection():
        for i, problem in enumerate(problems):
            watch(i)
            for name, changes in rotated([*settings.items()], i):
                prompt = problem.prompt
                own = replace(prompt, params=replace(prompt.params, **changes))
                run_together(engine, endless([own]), SETTLING_STEPS)  # another program ran
                (sample,) = run_together(engine, [own])
                answer = answer_of(sample.token_ids, prompt.token_ids, engine)
                answered[name].append(Answered(problem, answer, sample))
    return answered
