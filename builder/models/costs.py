"""Figures that each family computes: sizes that ranks split, and the costs of a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """A size of the model that ranks split into equal parts."""

    name: str
    size: int
    parts: int
    weights: str = ""  # the kind of weights that are cut; no block of their format may be cut


@dataclass(frozen=True)
class Costs:
    """The costs of a step on one rank that depend on the family."""

    row_operations: float  # operations of one token on one cached row of one layer
    activations: float  # most values per token in memory at once
    experts: int = 0  # routed experts of a layer
    chosen: int = 0  # routed experts that each token chooses
    # Values that a prompt's attention holds for each pair of token and visible row.
    scores: float = 0.0
    expanded: float = 0.0  # values that it holds for each row
    most_rows: int | None = None  # most rows that a token attends to; None: all
    attended: int = 0  # values of a row that attention reads; 0: all
    scoring: float = 0.0  # operations of one token on a row's other values, which choose rows

    def rows(self, context: int, tokens: int) -> int:
        """Return the most rows of a context that `tokens` tokens attend to."""
        return context if self.most_rows is None else min(context, tokens * self.most_rows)
