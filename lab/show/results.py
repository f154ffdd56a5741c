"""Writing of a measurement's results into a folder."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtpbuild.lab.show.pictures import Picture, explain_no_pictures
from mtpbuild.runtime.errors import UsageError, take_first_line


def check_writable(out: Path) -> None:
    """Check before the measurement that its results can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UsageError(f"--out {out}: can't write there ({error.strerror})") from None


def write_results(out: Path, name: str, document: dict[str, Any]) -> None:
    """Write NAME.json."""
    (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def draw_pictures(out: Path, pictures: Mapping[str, Picture]) -> list[str]:
    """Draw each picture as NAME.png; return a line for each that can't be drawn."""
    if (reason := explain_no_pictures()) is not None:
        return [reason]
    problems = []
    for name, picture in pictures.items():
        path = out / f"{name}.png"
        try:
            path.unlink(missing_ok=True)  # an earlier run's
            picture.draw(path)
        except Exception as error:  # whatever it is, the figures are there
            kind = type(error).__name__
            problems.append(f"{path}: can't be drawn ({kind}: {take_first_line(error)})")
    return problems
