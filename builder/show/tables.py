"""Tables and lines for people, as `bench`, `eval` and `verify` print them."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def figures_table(name: str, columns: Iterable[object]) -> Table:
    """A table without borders: names at the left, figures to the right."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(str(column), justify="right", no_wrap=True)
    return table


def say(*lines: str | Table | None, style: str | None = None) -> None:
    """Print tables, and lines that are not broken; what is None is left out."""
    console = Console(highlight=False)
    for line in lines:
        if line is not None:
            console.print(line, style=style, soft_wrap=isinstance(line, str))
