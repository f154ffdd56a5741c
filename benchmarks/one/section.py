"""The interface of a section, which measures figures for JSON and makes tables of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.table import Table

from one.cost import Cost
from one.machine import Machine
from one.report import Row, scaled
from one.run import Run
from one.sides import Measured

Data = dict[str, Any]
MS = 1e3


class Section(Protocol):
    """A part of the benchmark that can be measured alone."""

    def measure(self, run: Run) -> Data:
        """Return figures that can be stored as JSON."""
        ...

    def tables(self, found: "Found") -> list[Table]:
        """Return the tables to print for the figures."""
        ...


@dataclass(frozen=True)
class Found:
    """A section's figures, and the machine on which they were measured."""

    data: Mapping[str, Any]
    machine: Machine

    @property
    def measured(self) -> Measured:
        return Measured(self.data["rounds"])

    def cost(self, name: str) -> Cost | None:
        found = self.data["costs"].get(name)
        return None if found is None else Cost(**found)

    def bound(self, name: str, weights: str) -> float | None:
        """Return the least seconds of a pass."""
        cost = self.cost(name)
        return None if cost is None else cost.seconds(self.machine, weights)

    def timed(
        self,
        name: str,
        seconds: tuple[float | None, float | None],
        costs: tuple[str, str],
        weights: str,
    ) -> Row:
        """Return a row in milliseconds: times of both sides, and the bounds of their passes."""
        bounds = (self.bound(cost, weights) for cost in costs)
        return Row(name, "ms", (*(scaled(each, MS) for each in (*seconds, *bounds)),))
