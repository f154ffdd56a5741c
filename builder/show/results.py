"""The folder that a measurement writes its results to."""

import json
import tempfile
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
