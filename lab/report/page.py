"""A report as one page of HTML, which loads no other file, and as JSON."""

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from mtpbuild.lab.report.sections import Json
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.files import replace_file

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 }
th, td { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0;
  border-bottom: 1px solid #8884 }
td { font-variant-numeric: tabular-nums }
"""
FIRST = ("problems", "warnings", "model", "acceptance", "published", "verify", "speed", "forecast")


def write_report(document: Json, out: Path) -> None:
    """Write report.json and report.html, each whole or not at all."""
    texts = {"json": json.dumps(document, indent=1) + "\n", "html": render_report(document)}
    for ending, text in texts.items():
        path = out / f"report.{ending}"
        try:
            with replace_file(path) as file:
                file.write(text.encode())
        except OSError as error:
            raise UsageError(f"--out {path}: can't be written ({error.strerror})") from None


def render_report(document: Json) -> str:
    """Return the page."""
    title = "mtpbuild report"
    order = [name for name in FIRST if name in document]
    names = [*order, *(name for name in document if name not in order)]
    parts = (f"<h2>{_name(name)}</h2>{''.join(_show(document[name]))}" for name in names)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f"<!DOCTYPE html><html lang=en>{head}<h1>{title}</h1>{''.join(parts)}</html>\n"


def _name(key: str) -> str:
    return escape(key.replace("_", " "))


def _show(value: Any) -> Iterator[str]:
    """Yield a value as HTML: an object as rows; several objects as rows with the same columns."""
    rows = list(value.items()) if isinstance(value, dict) else []
    if rows and all(isinstance(row, dict) for _, row in rows):
        yield from _show([{"": name, **row} for name, row in rows])
    elif rows:
        cells = (f"<tr><th>{_name(key)}<td>{''.join(_show(part))}" for key, part in rows)
        yield f"<table>{''.join(cells)}</table>"
    elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        keys = list(dict.fromkeys(key for row in value for key in row))
        yield f"<table><tr>{''.join(f'<th>{_name(key)}' for key in keys)}"
        for row in value:
            yield "<tr>" + "".join(f"<td>{''.join(_show(row.get(key, '')))}" for key in keys)
        yield "</table>"
    elif isinstance(value, list):
        separator = " " if all(isinstance(part, int | float) for part in value) else "<br>"
        yield separator.join("".join(_show(part)) for part in value) or "none"
    elif isinstance(value, float):
        yield f"{value:.4g}"
    elif isinstance(value, int) and not isinstance(value, bool):
        yield f"{value:,}"
    else:
        yield escape("" if value is None else str(value))
