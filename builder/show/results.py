"""Writing of a measurement's results into a folder."""

import csv
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mtpbuild.runtime.errors import UsageError


def prepare(out: Path) -> None:
    """Check before the measurement that its results can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UsageError(f"--out {out}: can't write there ({error.strerror})") from None


def write_json(path: Path, results: dict[str, Any]) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a line per row; nested values get columns with dotted names."""
    flat = [dict(_flat(row)) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*names])
        writer.writeheader()
        writer.writerows(flat)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """List the values within objects and lists, each with the path to it."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, part in value.items():
        yield from _flat(part, f"{name}.{key}" if name else str(key))
