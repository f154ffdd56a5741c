"""Rows of figures: ours and the other side's, their bounds, a ratio and its aim."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rich.table import Table

NONE = "-"


@dataclass(frozen=True)
class Aim:
    """The value that a figure should not exceed, or should reach (`at_least`)."""

    value: float
    at_least: bool = False
    unit: str = ""

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.value:.3g}{self.unit}"

    def reached(self, value: float) -> bool:
        return value >= self.value if self.at_least else value <= self.value

    def colored(self, value: float) -> str:
        """Return the value in green if it reaches the aim, else in red."""
        color = "green" if self.reached(value) else "red"
        return f"[{color}]{value:.2f}[/{color}]"


@dataclass(frozen=True)
class Row:
    """A figure of both sides in `unit`, with their bounds; None stands for unknown.

    numbers: ours, theirs, our bound, their bound; the last ones may be left out. judged: what the
    aim applies to, usually a ratio. beside: what to compare `judged` with, such as the ratio of
    bytes or the other side's ratio.
    """

    name: str
    unit: str
    numbers: tuple[float | None, ...]
    judged: float | None = None
    beside: float | None = None
    aim: Aim | None = None

    def judge(
        self, ratio: float | None, aim: Aim | None = None, beside: float | None = None
    ) -> "Row":
        """Return the row with a judged number, its aim, and the number to compare it with."""
        return replace(self, judged=ratio, aim=aim, beside=beside)

    def cells(self) -> list[str]:
        judged = NONE if self.judged is None else f"{self.judged:.2f}"
        if self.aim is not None and self.judged is not None:
            judged = self.aim.colored(self.judged)
        ours, theirs, bound, their_bound = (*self.numbers, None, None, None)[:4]
        texts = (
            NONE if each is None else f"{each:.4g}" for each in (ours, bound, theirs, their_bound)
        )
        beside = NONE if self.beside is None else f"{self.beside:.2f}"
        aim = NONE if self.aim is None else str(self.aim)
        return [f"{self.name}, {self.unit}", *texts, judged, beside, aim]


def table(title: str, rows: Iterable[Row]) -> Table:
    columns = ["mtpbuild", "bound", "llama.cpp", "bound", "ratio", "beside", "aim"]
    grid = Table("figure", title=title, title_justify="left")
    for column in columns:
        grid.add_column(column, justify="right")
    for row in rows:
        grid.add_row(*row.cells())
    return grid


def over(above: float | None, below: float | None) -> float | None:
    """Return above / below, if both are known."""
    return above / below if above is not None and below else None


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def rate(count: float, seconds: float | None) -> float | None:
    return count / seconds if seconds else None
