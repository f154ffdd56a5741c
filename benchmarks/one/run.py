"""The settings with which every section measures."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """The folder for files, the most layers of the trunk, the rounds, and steps per request.

    peers: a Python that has llama.cpp; None measures our side alone.
    """

    folder: Path
    threads: int
    rounds: int
    steps: int
    layers: int | None
    peers: Path | None
    watch: Callable[[str], None]
