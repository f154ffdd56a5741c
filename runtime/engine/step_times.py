"""The seconds of a decode step by number of drafts: measured on this machine, kept in a file.

A step's time depends on the numbers of drafts, slots and cached rows, not on the text. So it is
measured before the first request, with random tokens, at a few points; later steps correct it.
Such a measurement may be wrong, e.g. by another program that ran beside it. So the times have
doubts, by which trials are chosen, and a table that steps refute is measured again.
"""

import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Adaptive, Programs
from mtpbuild.runtime.errors import take_first_line
from mtpbuild.runtime.files import find_user_cache, read_text, replace_file
from mtpbuild.runtime.limits import read_cpu_name
from mtpbuild.runtime.threads import choose_default_threads

Seconds: TypeAlias = NDArray[np.float64]  # [nextn + 1] of a step, by nextn

SHORT, LONG = 64, 4096  # cached rows of the measured steps
SHORTEST, LONGEST = 1e-9, 1e6  # seconds of a step that a table may have
STEPS = 10  # measured steps of each nextn
SLOW, SLOW_STEPS = 0.03, 2  # seconds from which a step is slow; measured steps of such a nextn
LOAD_SECONDS, BUILD_SECONDS = 2.0, 60.0  # for measurements at a load, at the end of a build
SAMPLED = StepControls(temperature=1.0)
# An unmeasured step is taken as the time of one without drafts, plus this share for each draft.
SHARE_PER_DRAFT = 0.3
# The logarithm of a time's error has a part that all times share, one that all with drafts share,
# and one of its own. The latter two have a deviation of LEAST_DOUBT after a quiet measurement; age
# and spread add to it. NOISE is the least variance of single steps; where steps read experts from a
# disk it is larger, and is learnt from differences of adjacent steps, each with a share of
# NOISE_SHARE. The drifts are what each step adds to the parts' variances, as machines change. A
# step that is off by DISTURBED deviations corrects nothing: if the machine has another speed now,
# the next step tells.
SHARED, GUESSED, SHARED_DRIFT, OWN_DRIFT = 2.0, 100.0, 6e-5, 1e-6
NOISE, NOISE_SHARE, DISTURBED = 0.01, 0.2, 4.0
LEAST_DOUBT, DOUBT_PER_DAY, MAX_DOUBT = 0.4, 0.01, 0.5
# A table is measured again if so many more steps were off by this ratio than were not; after each
# time it takes PATIENCE times as many.
OFF_RATIO, OFF_STEPS, PATIENCE = 1.25, 50, 10
KEEP_STEPS, KEEP_CHANGE = 256, 0.1  # how often corrections are kept; of which logarithm at least

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
    measured: float = 0.0  # Unix time
    factors: list[float] = []  # corrections by later steps
    spread: float = 0.0  # by how much the median steps took longer than the shortest

    def fits(self, nextn: int, most_slots: float = math.inf) -> bool:
        """Return whether these can be times of an engine's steps; points may be missing."""
        lists = [*self.slots.values(), *filter(None, (self.sampled, self.long))]
        rising = all(numbers == sorted(numbers) for numbers in lists)
        lists += [self.factors] if self.factors else []
        whole = all(len(numbers) == nextn + 1 for numbers in lists)
        usual = all(SHORTEST <= number <= LONGEST for numbers in lists for number in numbers)
        usual = usual and 0 <= self.measured < math.inf and 0 <= self.spread < math.inf
        return whole and usual and rising and all(1 <= size <= most_slots for size in self.slots)


@dataclass(frozen=True, slots=True)
class StepTableFile:
    """The place of an engine's step times on this machine with so many threads."""

    manifest: Manifest
    threads: int | None

    def read(self) -> StepTable:
        """Return the table; an empty one if there is none, or if it is damaged."""
        build = self.manifest.build
        with contextlib.suppress(OSError, ValueError):
            text = read_text(_find_path(self.manifest, self.threads), 1 << 20)
            table = StepTable.model_validate_json(text)
            if table.fits(build.nextn, build.slots):
                return table
        return StepTable(measured=time.time())

    def write(self, table: StepTable) -> None:
        try:
            path = _find_path(self.manifest, self.threads)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(path) as file:
                file.write(f"{table.model_dump_json(indent=1)}\n".encode())
        except OSError as error:
            log.warning("note: step times can't be kept for later starts: %s", error)


class StepTimes:
    """The expected seconds of a step: a table's, corrected by the steps of this process.

    The logarithms of the table's errors, by nextn, are estimated by a Kalman filter: a step also
    corrects the times of other numbers of drafts, as far as their errors are likely the same.
    """

    def __init__(
        self,
        nextn: int,
        table: StepTable | None = None,
        long_rows: int = LONG,
        file: StepTableFile | None = None,
    ) -> None:
        self._nextn, self._long_rows, self._file = nextn, long_rows, file
        self._off_limit = OFF_STEPS
        self._measurement: Iterator[None] | None = None
        self._use(table if table is not None and table.fits(nextn) else StepTable())

    def _use(self, table: StepTable) -> None:
        self._table = table
        slots = table.slots or {1: [1 + SHARE_PER_DRAFT * k for k in range(self._nextn + 1)]}
        self._sizes = sorted(slots)
        self._times = np.array([slots[size] for size in self._sizes])  # [sizes, nextn + 1]
        short = self._times[0]
        self._per_sampling_slot = _fit_line(np.array(table.sampled or short) - short)
        self._per_row = _fit_line(np.array(table.long or short) - short)
        self._per_row /= max(self._long_rows - SHORT, 1)
        self._by_slots: dict[int, Seconds] = {}
        drafts = np.arange(self._nextn + 1) > 0
        identity = np.outer(drafts, drafts) + np.eye(self._nextn + 1)
        self._errors = self._kept = np.log(table.factors or np.ones(self._nextn + 1))
        days = max(time.time() - table.measured, 0) / 86400
        doubt = min(LEAST_DOUBT + DOUBT_PER_DAY * days + table.spread, MAX_DOUBT)
        self._covariance = (SHARED if table.slots else GUESSED) + doubt**2 * identity
        self._drift = SHARED_DRIFT + OWN_DRIFT * identity
        self._factors = np.exp(self._errors)
        self._noise, self._difference = NOISE, 0.0  # of adjacent steps, the mean
        self._last = (-1, 0.0)  # the last step's nextn and error
        self._steps = self._off = 0

    def seconds(self, size: StepSize) -> Seconds:
        """Return the seconds of a step of this size, for each nextn."""
        expected = self._look_up_seconds(size.slots)
        if (rows := size.rows - SHORT * size.slots) > 0:
            expected = expected + self._per_row * rows
        if size.sampling:
            expected = expected + self._per_sampling_slot * size.sampling
        corrected: Seconds = expected * self._factors
        return corrected

    def doubts(self, nextn: int) -> Seconds:
        """Return the standard deviations of the logarithms of seconds divided by a nextn's.

        Those that a single step would not make smaller are 0.
        """
        row, others = self._covariance[nextn], self._covariance.diagonal()
        deviations: Seconds = np.sqrt(np.maximum(others + row[nextn] - 2 * row - self._noise, 0))
        return deviations

    def _look_up_seconds(self, slots: int) -> Seconds:
        """Return the table's seconds of a step with SHORT rows in each of so many slots."""
        if (expected := self._by_slots.get(slots)) is None:
            interpolated = [np.interp(slots, self._sizes, times) for times in self._times.T]
            expected = self._by_slots[slots] = np.array(interpolated)
        return expected

    def correct(self, size: StepSize, nextn: int, seconds: float) -> None:
        """Correct the times by a step's measured seconds."""
        error = math.log(max(seconds, 1e-9) / float(self.seconds(size)[nextn]))
        if not self.refuted:
            off = abs(error + self._errors[nextn]) > math.log(OFF_RATIO)
            self._off = max(self._off + (1 if off else -1), 0)
        self._learn_noise(nextn, error + float(self._errors[nextn]))
        self._covariance += self._drift
        column = self._covariance[nextn]
        variance = float(column[nextn]) + self._noise
        if abs(error) > DISTURBED * math.sqrt(variance):
            self._covariance += SHARED
        else:
            gain = column / variance
            self._errors = self._errors + gain * error
            self._covariance -= gain[:, None] * column
            self._factors = np.exp(self._errors)
        self._steps += 1
        if self._steps % KEEP_STEPS == 0:
            self.keep()

    def _learn_noise(self, nextn: int, error: float) -> None:
        """Learn the variance of single steps; error: of the table, uncorrected."""
        last_nextn, last = self._last
        self._last = nextn, error
        if nextn == last_nextn:
            self._difference += NOISE_SHARE * (abs(error - last) - self._difference)
            # As for normal numbers. Squares would make much of a single step that was disturbed.
            self._noise = max(math.pi / 4 * self._difference**2, NOISE)

    @property
    def refuted(self) -> bool:
        """Whether the table is to be measured again."""
        off = self._file is not None and self._off >= self._off_limit
        return off or self._measurement is not None

    def keep(self) -> None:
        """Keep the corrected table for later starts, if corrections have changed."""
        change = float(np.abs(self._errors - self._kept).max())
        if self._file is not None and self._table.slots and change > KEEP_CHANGE:
            self._kept = self._errors
            self._file.write(self._table.model_copy(update={"factors": self._factors.tolist()}))

    def measure_again(self, programs: Adaptive) -> None:
        """Run a step of a new measurement, while there is no request; the last one ends it."""
        self._measurement = self._measurement or self._renew(programs)
        try:
            next(self._measurement, None)
        except Exception as error:
            log.warning("note: step times can't be measured: %s", take_first_line(error))

    def _renew(self, programs: Adaptive) -> Iterator[None]:
        try:
            self._off, self._off_limit = 0, self._off_limit * PATIENCE
            table = StepTable(measured=time.time())
            file = cast(StepTableFile, self._file)
            yield from _measure(programs, file.manifest, table, math.inf)
            file.write(table)
            self._use(table)
        finally:
            self._measurement = None


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
    file = StepTableFile(manifest, threads)
    table = file.read()
    if [*_measure(cast(Adaptive, programs), manifest, table, seconds)]:
        file.write(table)
    return StepTimes(manifest.build.nextn, table, _choose_long_rows(manifest), file)


def _find_path(manifest: Manifest, threads: int | None) -> Path:
    """Return the file of an engine's step times on this processor with so many threads."""
    machine = f"{read_cpu_name()}, {threads or choose_default_threads()} threads"
    name = hashlib.sha256(f"{manifest.build.fingerprint} {machine}".encode()).hexdigest()[:16]
    return find_user_cache() / "step-times" / f"{name}.json"


def _choose_long_rows(manifest: Manifest) -> int:
    return min(LONG, manifest.build.max_seq_len - manifest.window)


def _measure(
    programs: Adaptive, manifest: Manifest, table: StepTable, seconds: float
) -> Iterator[None]:
    """Measure the table's missing points for about so many seconds; yield after each step."""
    build, start = manifest.build, time.perf_counter()
    powers = [1 << i for i in range(build.slots.bit_length())]
    for slots in dict.fromkeys([1, build.slots, *(p for p in powers if p < build.slots)]):
        if slots not in table.slots and time.perf_counter() - start < seconds:
            size = StepSize(slots, SHORT * slots)
            table.slots[slots] = yield from _time_steps(programs, manifest, table, size)
    if not table.sampled and time.perf_counter() - start < seconds:
        table.sampled = yield from _time_steps(programs, manifest, table, StepSize(1, SHORT, 1))
    if not table.long and time.perf_counter() - start < seconds:
        table.long = yield from _time_steps(programs, manifest, table, StepSize(1, LONG))


def _time_steps(
    programs: Adaptive, manifest: Manifest, table: StepTable, size: StepSize
) -> Generator[None, None, list[float]]:
    """Return the seconds of a step, by nextn; yield after each step. The slots stay free.

    Tokens and drafts are random: equal ones would visit the same experts.
    """
    build, rng = manifest.build, np.random.default_rng(0)
    rows = min(size.rows // size.slots, build.max_seq_len - manifest.window)
    active = np.arange(build.slots) < size.slots
    rounds = list[list[float]]()
    while len(rounds) <= (STEPS if not rounds or max(rounds[-1]) < SLOW else SLOW_STEPS):
        rounds.append([])
        for nextn in range(build.nextn + 1):
            programs.draft(nextn)
            for slot in range(size.slots):
                newest, *drafts = rng.integers(manifest.model.vocab_size, size=nextn + 1).tolist()
                programs.begin(slot, rows, newest, SAMPLED if size.sampling else GREEDY)
                programs.propose(slot, drafts)
            start = time.perf_counter()
            programs.step(active, rows + manifest.window)
            rounds[-1].append(time.perf_counter() - start)
            yield
    least = np.min(rounds[1:], 0)  # the first round is not counted; disturbances only add time
    spread = float((np.median(rounds[1:], 0) / least).mean()) - 1
    table.spread = max(table.spread, spread)
    rising: list[float] = np.minimum.accumulate(least[::-1])[::-1].tolist()  # more drafts take more
    return rising
