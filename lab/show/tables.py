"""Tables and lines for people, as all commands print them."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table


def make_figures_table(name: str, columns: Iterable[object]) -> Table:
    """Make a table without borders: names on the left, figures right-aligned."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(str(column), justify="right", no_wrap=True)
    return table


def make_names_column(title: str, names: Sequence[str]) -> Column:
    """Make a column of names that folds them only if one is longer than half a terminal."""
    return Column(title, overflow="fold", no_wrap=max(map(len, names), default=0) <= 40)


def print_lines(*lines: str | Table | None, style: str | None = None, fold: bool = True) -> None:
    """Print tables, and lines without wrapping; None is left out.

    fold: whether tables are folded to the terminal's width.
    """
    console = Console(highlight=False)
    for line in lines:
        if line is not None:
            console.print(line, style=style, soft_wrap=isinstance(line, str) or not fold)
