"""Runs one side at a time, each in its own process, and collects the answers.

Sides take turns, round after round, because two might not fit into memory together. A side's files
are read once before it starts, so that the page cache is warm.
"""

import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_process import PeerProcess

from one.run import Run

PEER = Path(__file__).parents[1] / "peer"
OURS, LLAMA, LLAMA_MTP = "mtpbuild", "llama.cpp", "llama.cpp, MTP"
LLAMA_Q8 = "llama.cpp, q8_0 caches"
WARM = 2  # steps at the start of a request that are not counted
PATIENCE = 3600  # most seconds for an answer
CHUNK = 1 << 24

Answers = dict[str, dict[str, Any]]  # by the ask's name; a side that died has `error`


@dataclass(frozen=True)
class Side:
    """An engine of ours or a GGUF file, and the asks for it, by name.

    rows: the most cached tokens that a request needs. drafts: a step's, if llama.cpp's server runs
    the MTP module of its file, or `head`, a file. caches: llama.cpp's type of keys and values,
    "f16" or "q8_0"; with the latter it uses its flash attention. repack: whether llama.cpp copies
    weights into memory of its own. group: the control group that the process joins; its files are
    then read once by a process of that group, as far as its memory goes.
    """

    name: str
    python: Path
    path: Path
    asks: Mapping[str, Mapping[str, Any]]
    vocabulary: int
    rows: int = 2048
    drafts: int = 0
    head: Path | None = None
    caches: str = "f16"
    repack: bool = True
    group: Path | None = None

    @property
    def script(self) -> str:
        if self.path.suffix != ".gguf":
            return str(PEER / "ours_side.py")
        return str(PEER / ("llama_server_side.py" if self.drafts else "llama_side.py"))

    def run(self, threads: int) -> Answers:
        """Return answers by name; "first" has the seconds from start to first token."""
        for path in (self.path, *([self.head] if self.head else [])):
            if self.group is None:
                warm(path)
            else:
                drop(path)
        job = {"path": str(self.path), "threads": threads, "rows": self.rows}
        job |= {"vocabulary": self.vocabulary, "drafts": self.drafts, "caches": self.caches}
        job |= {"head": None if self.head is None else str(self.head), "repack": self.repack}
        command = [str(self.python), self.script, json.dumps(job)]
        if self.group is not None:
            files = shlex.join(map(str, list_files(self.path)))
            join = f'echo $$ > {self.group}/cgroup.procs; cat {files} > /dev/null; exec "$@"'
            command = ["sh", "-c", join, "sh", *command]
        process = PeerProcess(command, threads, PATIENCE)
        answers = {"first": process.ready}
        try:
            answers |= {name: process.ask(**ask) for name, ask in self.asks.items()}
        finally:
            process.close()
        found: Answers = {name: answer for name, answer in answers.items() if answer is not None}
        return found | ({"error": {"message": process.error}} if process.error else {})


def ours(name: str, engine: Path, asks: Mapping[str, Any], vocabulary: int) -> Side:
    return Side(name, Path(sys.executable), engine, asks, vocabulary)


def decode(
    steps: int,
    context: int,
    batch: int = 1,
    filled: bool = True,
    rates: Sequence[float] | None = None,
    window: int = 1,
    drawn: bool = False,
) -> dict[str, Any]:
    """Return an ask for side.py's `decode`; rates are for our side, a window for theirs.

    rates: how often the first draft, the first two and so on are accepted. None: the greedy
    program, where the model judges the drafts. drawn: our tokens are drawn at temperature 1, as
    theirs are random.
    """
    ask = {"kind": "decode", "steps": steps + WARM, "context": context, "batch": batch}
    return ask | {"filled": filled, "rates": rates, "window": window, "drawn": drawn}


def prompt(length: int, times: int = 2) -> dict[str, Any]:
    return {"kind": "prompt", "length": length, "times": times}


def warm(path: Path) -> None:
    """Read every byte of a file or folder, so that it is in the page cache."""
    for each in list_files(path):
        with each.open("rb", buffering=0) as file:
            while file.read(CHUNK):
                pass


def drop(path: Path) -> None:
    """Drop a file or folder from the page cache."""
    for each in list_files(path):
        with each.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def list_files(path: Path) -> list[Path]:
    """List the file, or all files in a folder."""
    return [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]


def take_turns(sides: Sequence[Side], run: Run) -> dict[str, list[Answers]]:
    """Run the sides in turn; return each side's answers, a list entry for each round."""
    found: dict[str, list[Answers]] = {side.name: [] for side in sides}
    for i in range(run.rounds):
        turn = i % len(sides)
        for side in [*sides[turn:], *sides[:turn]]:
            run.watch(f"round {i + 1} of {run.rounds}: {side.name}")
            answers = side.run(run.threads)
            if "error" in answers:
                run.watch(f"{side.name} {answers['error']['message']}")
            found[side.name].append(answers)
    return found


@dataclass(frozen=True)
class Measured:
    """A section's answers by side: medians over rounds, None where there is no answer."""

    rounds: Mapping[str, Sequence[Answers]]

    def step(self, side: str, ask: str) -> float | None:
        """Return the seconds of a step, the median of the rounds' medians."""
        return self._median(side, ask, lambda answer: statistics.median(answer["steps"][WARM:]))

    def drafting_step(self, side: str, ask: str) -> float | None:
        """Return the seconds of a step of llama.cpp's server with drafts."""
        return self._median(side, ask, lambda answer: answer["step_s"])

    def speed(self, side: str, ask: str) -> float | None:
        """Return tokens per second of all requests together, the median of the rounds."""
        return self._median(
            side, ask, lambda answer: sum(answer["emitted"][WARM:]) / sum(answer["steps"][WARM:])
        )

    def read(self, side: str, ask: str) -> float | None:
        """Return the bytes that a step reads from the disk."""
        return self._median(side, ask, lambda answer: statistics.mean(answer["read"][WARM:]))

    def mean_step(self, side: str, ask: str) -> float | None:
        """Return the mean seconds of a step, whose reads differ from step to step."""
        return self._median(side, ask, lambda answer: statistics.mean(answer["steps"][WARM:]))

    def prompt(self, side: str, ask: str) -> float | None:
        """Return the seconds to the first token after a prompt."""
        return self._median(side, ask, lambda answer: statistics.median(answer["seconds"]))

    def first(self, side: str) -> float | None:
        return self._median(side, "first", lambda answer: answer["first_s"])

    def memory(self, side: str, ask: str, kind: str = "VmHWM") -> float | None:
        """Return the process's bytes at the time of the answer."""
        return self._median(side, ask, lambda answer: answer[kind])

    def _median(
        self, side: str, ask: str, figure: Callable[[dict[str, Any]], float]
    ) -> float | None:
        rounds = self.rounds.get(side, ())
        found = [figure(answers[ask]) for answers in rounds if ask in answers]
        return statistics.median(found) if found and None not in found else None
