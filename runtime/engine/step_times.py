"""The seconds of a decode step by number of drafts: measured on this machine, kept in a file.

A step's time depends on the numbers of drafts, slots and cached rows, not on the text. So it is
measured before the first request, with random tokens, at a few points; later steps correct it.
"""

import contextlib
import hashlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Adaptive, Programs
from mtpbuild.runtime.files import find_user_cache, read_text, replace_file
from mtpbuild.runtime.limits import read_cpu_name
from mtpbuild.runtime.threads import choose_default_threads

Seconds: TypeAlias = NDArray[np.float64]  # [nextn + 1] of a step, by nextn

SHORT, LONG = 64, 4096  # cached rows of the measured steps
STEPS = 10  # measured steps of each nextn
SLOW, SLOW_STEPS = 0.03, 2  # seconds from which a step is slow; measured steps of such a nextn
LOAD_SECONDS, BUILD_SECONDS = 2.0, 60.0  # for measurements at a load, at the end of a build
SAMPLED = StepControls(temperature=1.0)
# An unmeasured step is taken as the time of one without drafts, plus this share for each draft.
SHARE_PER_DRAFT = 0.3
# Learning rates per step: of all times, and of the time of the step's own nextn. The latter's
# correction fades, so that a nextn that is not chosen does not keep a wrong one.
SHARED_RATE, OWN_RATE, OWN_DECAY = 0.08, 0.02, 0.998

log = logging.getLogger("mtpbuild")


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a step, on which its time depends beside nextn.

    rows: cached rows of all its slots together. sampling: those slots that sample.
    """

    slots: int
    rows: int
    sampling: int = 0


class StepTable(BaseModel):
    """An engine's measured seconds on a machine; each list is by nextn."""

    model_config = ConfigDict(extra="forbid", strict=True)

    slots: dict[int, list[float]] = {}  # by number of slots, with SHORT rows each
    sampled: list[float] = []  # one slot, which samples
    long: list[float] = []  # one slot, with LONG rows or as many as fit


class StepTimes:
    """The expected seconds of a step: a table's, corrected by the steps of this process."""

    def __init__(self, nextn: int, table: StepTable | None = None, long_rows: int = LONG) -> None:
        table = table or StepTable()
        guess = [1 + SHARE_PER_DRAFT * k for k in range(nextn + 1)]
        slots = table.slots or {1: guess}
        self._sizes = sorted(slots)
        self._times = np.array([slots[size] for size in self._sizes])  # [sizes, nextn + 1]
        short = self._times[0]
        self._per_sampling_slot = _fit_line(np.array(table.sampled or short) - short)
        self._per_row = _fit_line(np.array(table.long or short) - short)
        self._per_row /= max(long_rows - SHORT, 1)
        self._by_slots: dict[int, Seconds] = {}
        self._scale = 1.0
        self._own = np.ones(nextn + 1)
        self._known = bool(table.slots)

    def seconds(self, size: StepSize) -> Seconds:
        """Return the seconds of a step of this size, for each nextn."""
        found = self._look_up_seconds(size.slots)
        if (rows := size.rows - SHORT * size.slots) > 0:
            found = found + self._per_row * rows
        if size.sampling:
            found = found + self._per_sampling_slot * size.sampling
        corrected: Seconds = found * (self._own * self._scale)
        return corrected

    def _look_up_seconds(self, slots: int) -> Seconds:
        """Return the table's seconds of a step with SHORT rows in each of so many slots."""
        if (found := self._by_slots.get(slots)) is None:
            each = [np.interp(slots, self._sizes, times) for times in self._times.T]
            found = self._by_slots[slots] = np.array(each)
        return found

    def correct(self, size: StepSize, nextn: int, seconds: float) -> None:
        """Correct the times by a step's measured seconds."""
        ratio = max(seconds, 1e-9) / float(self.seconds(size)[nextn])
        if not self._known:  # the first step says what a guess is in seconds
            self._scale, self._known = ratio, True
            return
        ratio = min(max(ratio, 0.5), 2.0)  # the step may have been disturbed
        self._scale *= ratio**SHARED_RATE
        self._own **= OWN_DECAY
        self._own[nextn] *= ratio**OWN_RATE


def _fit_line(seconds: Seconds) -> Seconds:
    """Return a line through seconds by nextn, of at least 0; a disturbed one hardly moves it.

    Each further draft samples one row and attends to all rows once more. The line has the median of
    all slopes between two points (Theil and Sen).
    """
    k = np.arange(len(seconds))
    i, j = np.triu_indices(len(seconds), 1)
    slope = np.median((seconds[j] - seconds[i]) / (j - i)) if len(seconds) > 1 else 0.0
    return np.maximum(np.median(seconds - slope * k) + slope * k, 0)


def open_step_times(
    programs: Programs, manifest: Manifest, threads: int | None, seconds: float
) -> StepTimes:
    """Return an adaptive engine's step times on this machine; measure those not in its file.

    seconds: after this time no further points are measured; a later call measures them.
    """
    table = _read(manifest, threads)
    if _measure(cast(Adaptive, programs), manifest, table, seconds):
        try:
            path = _find_path(manifest, threads)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(path) as file:
                file.write(f"{table.model_dump_json(indent=1)}\n".encode())
        except OSError as error:
            log.warning("note: step times can't be kept for later starts: %s", error)
    return StepTimes(manifest.build.nextn, table, _choose_long_rows(manifest))


def _find_path(manifest: Manifest, threads: int | None) -> Path:
    """Return the file of an engine's step times on this processor with so many threads."""
    machine = f"{read_cpu_name()}, {threads or choose_default_threads()} threads"
    name = hashlib.sha256(f"{manifest.build.fingerprint} {machine}".encode()).hexdigest()[:16]
    return find_user_cache() / "step-times" / f"{name}.json"


def _read(manifest: Manifest, threads: int | None) -> StepTable:
    """Read a table; return an empty one if there is none, or if it is not this engine's."""
    nextn = manifest.build.nextn
    with contextlib.suppress(OSError, ValidationError):
        table = StepTable.model_validate_json(read_text(_find_path(manifest, threads)))
        lists = [*table.slots.values(), table.sampled, table.long]
        numbers = [number for each in lists for number in each]
        if all(len(each) in (0, nextn + 1) for each in lists) and min(numbers, default=1) > 0:
            return table
    return StepTable()


def _choose_long_rows(manifest: Manifest) -> int:
    return min(LONG, manifest.build.max_seq_len - manifest.window)


def _measure(programs: Adaptive, manifest: Manifest, table: StepTable, seconds: float) -> bool:
    """Measure the table's missing points for about so many seconds; return whether it changed."""
    build, start, changed = manifest.build, time.perf_counter(), False
    powers = [1 << i for i in range(build.slots.bit_length())]
    for size in dict.fromkeys([1, build.slots, *(p for p in powers if p < build.slots)]):
        if size not in table.slots and time.perf_counter() - start < seconds:
            table.slots[size] = _time_steps(programs, manifest, size)
            changed = True
    if not table.sampled and time.perf_counter() - start < seconds:
        table.sampled = _time_steps(programs, manifest, 1, controls=SAMPLED)
        changed = True
    if not table.long and time.perf_counter() - start < seconds:
        table.long = _time_steps(programs, manifest, 1, rows=_choose_long_rows(manifest))
        changed = True
    return changed


def _time_steps(
    programs: Adaptive,
    manifest: Manifest,
    slots: int,
    *,
    rows: int = SHORT,
    controls: StepControls = GREEDY,
) -> list[float]:
    """Return the seconds of a step, by nextn; the slots stay free.

    Tokens and drafts are random: equal ones would visit the same experts.
    """
    build, rng = manifest.build, np.random.default_rng(0)
    rows = min(rows, build.max_seq_len - manifest.window)
    active = np.arange(build.slots) < slots
    rounds = list[list[float]]()
    while len(rounds) <= (STEPS if not rounds or max(rounds[-1]) < SLOW else SLOW_STEPS):
        rounds.append([])
        for nextn in range(build.nextn + 1):
            programs.draft(nextn)
            for slot in range(slots):
                newest, *drafts = rng.integers(manifest.model.vocab_size, size=nextn + 1).tolist()
                programs.begin(slot, rows, newest, controls)
                programs.propose(slot, drafts)
            start = time.perf_counter()
            programs.step(active, rows + manifest.window)
            rounds[-1].append(time.perf_counter() - start)
    least = np.min(rounds[1:], 0)  # the first round is not counted; disturbances only add time
    found: list[float] = np.minimum.accumulate(least[::-1])[::-1].tolist()  # more drafts take more
    return found
