"""The pace of a loop says how one step follows another: one at a time, or a step ahead."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from mtpbuild.runtime.contract.programs import Bools, Overlapping, Programs, StepOutput
from mtpbuild.runtime.request import Request

Running: TypeAlias = Sequence[tuple[int, Request]]  # the requests of a step, with their slots
Land: TypeAlias = Callable[[], StepOutput]  # waits for a step and gives its output


class Pace:
    """Steps one at a time: the step is done when `launch` returns."""

    ahead = False  # whether the next step is launched before this one's tokens are read

    def launch(self, programs: Programs, running: Running, active: Bools, rows: int) -> Land:
        output = programs.step(active, rows)
        return lambda: output

    def add(self, request: Request, accepted: int, drafted: int) -> None:
        """Learn what became of a request's drafts in a step."""


class OverlappingPace(Pace):
    """Launches a step while the one before it runs."""

    ahead = True

    def launch(self, programs: Programs, running: Running, active: Bools, rows: int) -> Land:
        return cast(Overlapping, programs).launch(active, rows)
