"""The pace of a loop: how one step follows another, one at a time or overlapping."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from mtpbuild.runtime.contract.programs import Bools, Overlapping, Programs, StepOutput
from mtpbuild.runtime.request import Request

Running: TypeAlias = Sequence[tuple[int, Request]]  # the requests of a step with their slots
Land: TypeAlias = Callable[[], StepOutput]  # waits for a step and returns its output


class Pace:
    """A pace of one step at a time: the step is done when `launch` returns."""

    ahead = False  # whether the next step is launched before this one's tokens are read

    def launch(self, programs: Programs, running: Running, active: Bools, rows: int) -> Land:
        output = programs.step(active, rows)
        return lambda: output

    def add(self, request: Request, accepted: int, drafted: int) -> None:
        """Record how many of a request's drafts a step accepted."""


class OverlappingPace(Pace):
    """A pace that launches a step while the one before it runs."""

    ahead = True

    def launch(self, programs: Programs, running: Running, active: Bools, rows: int) -> Land:
        return cast(Overlapping, programs).launch(active, rows)
