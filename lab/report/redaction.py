"""Removal of what is the user's own from a report: names and paths."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PATHS = re.compile(r"(?<![\w:./])(?:~|/)[\w.@+~-]*(?:/[\w.@+~-]+)+")  # absolute ones
PRIVATE, PLACE = "[name]", "[path]"


def redact(document: Any, names: Iterable[str | Path]) -> Any:
    """Replace names, and all absolute paths, in every text of a JSON document, but for its keys."""
    texts = {str(name) for name in names} | {Path.home().name, str(Path.home()), str(Path.cwd())}
    longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    known = "|".join(map(re.escape, longest_first))
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{known})(?![A-Za-z0-9])")

    def clean(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: clean(value) for key, value in part.items()}
        if isinstance(part, list | tuple):
            return [clean(value) for value in part]
        if isinstance(part, str) and not part.startswith("https://"):
            return PATHS.sub(PLACE, pattern.sub(PRIVATE, part))
        return part

    return clean(document)
