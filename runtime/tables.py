"""Tables and lines for people, as all commands print them."""

from collections.abc import Collection, Iterable, Sequence

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
    follow in a table of their own, again after the first column.
    """
    console = _make_console()
    columns = [*zip(*rows, strict=True)]
    wraps = [place == 0 or column[0] in texts for place, column in enumerate(columns)]
    least = [_measure_column(*pair) for pair in zip(columns, wraps, strict=True)]
    parts = [[0]]  # numbers of columns
    for place in range(1, len(columns)):
        needed = sum(least[i] + GAP for i in (*parts[-1], place)) - GAP
        if len(parts[-1]) > 1 and needed > console.width:
            parts.append([0])
        parts[-1].append(place)
    for part in parts:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        room = max(1, console.width - sum(least[i] + GAP for i in part[1:]))  # for the names
        for i in part:
            if wraps[i]:
                width = least[i] if i else min(least[i], room)
                table.add_column(columns[i][0], overflow="fold", min_width=width)
            else:
                table.add_column(columns[i][0], justify="right", no_wrap=True)
        for cells in zip(*(columns[i][1:] for i in part), strict=True):
            table.add_row(*cells)
        console.print(table)


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


def _measure_column(cells: Row, wraps: bool) -> int:
    """Return the least width of a column; one that wraps needs its longest word's."""
    texts = map(str, cells)
    return max(cell_len(part) for text in texts for part in (text.split() if wraps else [text]))
