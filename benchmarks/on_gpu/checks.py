"""Checks of a run on a GPU, each printed as soon as it is made."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PASSED, FAILED = "passed", "failed"
NO_GPU = "skipped: no GPU"
ON_CPU = "on the CPU alone"  # it ran, but that proves nothing about a GPU
NOTED = "noted"


class Checks:
    """Checks that are printed, and appended to a file as JSON."""

    def __init__(self, rows: Path | None) -> None:
        self._rows = rows
        self.failed = False

    def say(self, what: str, status: str, detail: str = "") -> None:
        self.failed |= status == FAILED
        print(what, status, detail, sep=" | ", flush=True)
        if self._rows:
            with self._rows.open("a") as file:
                print(json.dumps({"what": what, "status": status, "detail": detail}), file=file)

    def make(self, what: str, check: Callable[[], str], gpu: bool = True) -> bool:
        """Run a check and report its result, or its error.

        gpu: whether it runs on a GPU.
        """
        try:
            detail = check()
        except Exception as error:  # any error: later checks may still give information
            lines = str(error).strip().splitlines() or [""]
            self.say(what, FAILED, f"{type(error).__name__}: {lines[0]}")
            return False
        self.say(what, PASSED if gpu else ON_CPU, detail)
        return True

    def skip(self, *whats: str, why: str = NO_GPU) -> None:
        for what in whats:
            self.say(what, why)

    def end(self) -> None:
        if self.failed:
            sys.exit(1)


def parse_flags(description: str | None) -> tuple[Checks, argparse.Namespace]:
    """Parse the command line; return the checks and all flags."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--smoke", action="store_true", help="without a GPU")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--engine", type=Path, help="of a soak")
    parser.add_argument("--seconds", type=float, default=90, help="of a soak")
    arguments = parser.parse_args()
    return Checks(arguments.rows), arguments


def near(got: Any, wanted: Any, limit: float) -> str:
    """Describe the largest difference of two tensors; raise ValueError unless it is small."""
    apart = float((got.float().cpu() - wanted.float().cpu()).abs().max())
    if not apart < limit:
        raise ValueError(f"off by {apart:.2g}, more than {limit:g}")
    return f"off by {apart:.2g}"
