"""Launching of steps: each after the step before it, or while that step runs."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from mtpbuild.runtime.contract.programs import Bools, Overlapping, Programs, StepOutput
from mtpbuild.runtime.requests.request import Request

Running: TypeAlias = Sequence[tuple[int, Request]]  # the requests of a step with their slots
ReadOutput: TypeAlias = Callable[[], StepOutput]  # waits for a step and returns its output


class StepLauncher:
    """A launcher of one step at a time: the step is done when `launch` returns."""

    ahead = False  # whether the next step is launched before a step's tokens are read
    idle_work = False  # whether `work_idle` has something to do

    def launch(self, programs: Programs, running: Running, active: Bools, rows: int) -> ReadOutput:
        output = programs.step(active, rows)
        return lambda: output

    def add(self, request: Request, accepted: int, drafted: int) -> None:
        """Record how many of a request's drafts a step accepted."""

    def work_idle(self, programs: Programs) -> None:
        """Do a short piece of the work that waits until there are no requests."""

    def close(self) -> None:
        """Keep what later processes may use."""


class OverlappingLauncher(StepLauncher):
    """A launcher that starts a step while the step before it runs."""

    ahead = True

    def launch(self, programs: Programs, running: Running, active: Bools, rows: int) -> ReadOutput:
        return cast(Overlapping, programs).launch(active, rows)
