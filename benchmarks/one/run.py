"""How to measure: what every section is given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """A folder for files, layers of the trunk at most, rounds, and steps of each request.

    peers: a Python that has llama.cpp; None: our side alone.
    """

    folder: Path
    threads: int
    rounds: int
    steps: int
    layers: int | None
    peers: Path | None
    watch: Callable[[str], None]
