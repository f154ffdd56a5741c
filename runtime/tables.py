"""Tables and lines for people, as all commands print them."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

Row = Sequence[str | Text]
GAP = 2  # spaces between columns
PIPED = 10_000  # columns of what is no terminal: nothing is wrapped there


def print_lines(*lines: str | None, style: str | None = None) -> None:
    """Print lines, which a terminal shows wrapped between words; None is left out."""
    console = _make_console()
    for line in lines:
        if line is not None:
            console.print(line, style=style)


def print_table(rows: Iterable[Row], texts: Collection[str] = ()) -> None:
    """Print a table whose first row names the columns.

    texts: the columns that may be wrapped between words, besides the first one. All others have
    figures, which are on the right and never wrapped: those that a narrow terminal has no room for
    follow in a table of their own, again after the first column. If there is no room for one of
    them, each cell is a line.
    """
    names, *lines = rows
    console = _make_console()
    columns = [*zip(names, *lines, strict=True)]
    wraps = [column[0] in (names[0], *texts) for column in columns]
    widths = [max(cell_len(str(cell)) for cell in column) for column in columns]
    words = [(word for cell in column for word in str(cell).split()) for column in columns]
    least = [max(map(cell_len, words[i])) if wraps[i] else widths[i] for i in range(len(columns))]
    if least[0] + max(least[1:]) + 2 * GAP > console.width:
        for cells in lines:
            print_lines(*(f"{name}: {cell}" for name, cell in zip(names, cells, strict=True)), "")
        return
    parts = [[0]]  # numbers of columns
    for place in range(1, len(columns)):
        if sum(least[i] + GAP for i in (*parts[-1], place)) > console.width:
            parts.append([0])
        parts[-1].append(place)
    for part in parts:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        fitting = {i: widths[i] for i in part}
        while sum(width + GAP for width in fitting.values()) > console.width:
            widest = max(part, key=lambda i: fitting[i] if fitting[i] > least[i] else 0)
            fitting[widest] -= 1
        for i in part:
            justify: Any = "left" if wraps[i] else "right"
            table.add_column(columns[i][0], justify=justify, width=fitting[i])
        for cells in lines:
            table.add_row(*(cells[i] for i in part))
        console.print(table)
        console.print()


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and what they are, which a terminal shows wrapped between words."""
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, GAP, 0, 0))
    for fact in facts:
        table.add_row(*fact)
    _make_console().print(table)


def _make_console() -> Console:
    """Return the console of standard output, which prints brackets and figures as they are."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPED
    return console
