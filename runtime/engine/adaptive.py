"""The choice of the number of drafts per step, from acceptance and step times."""

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from mtpbuild.runtime.contract.programs import Adaptive, Bools, Programs
from mtpbuild.runtime.engine.acceptance import PRIOR, AcceptanceModel, Belief
from mtpbuild.runtime.engine.launcher import ReadOutput, Running, StepLauncher
from mtpbuild.runtime.engine.step_times import Seconds, StepSize, StepTimes

SWITCH_GAIN = 1.03  # required gain of a change, as the change's own step verifies fewer drafts
TRIAL_SHARE = 0.01  # most of a request's time that trials may lose
TRIAL_STEPS = 2  # steps of a trial after its first one, which has too few drafts to verify
TRIAL_GAIN = 3.0  # required expected gain of a trial, over what it is expected to lose
# A trial's result is used for this many tokens at most, as texts change; and a new request's share
# of trials is reckoned for this many tokens at most, as most requests end long before `max_tokens`.
HORIZON = 200


@dataclass(slots=True)
class NextnChoice:
    """The nextn of a step; best: the one with the most tokens per second, as far as is known."""

    nextn: int
    best: int
    rate: float  # expected tokens per second with the best
    seconds: float = 0.0  # of the step
    tokens: int = 0  # emitted by it


class AdaptiveNextn(StepLauncher):
    """The choice and timing of each step's nextn, for the requests that share the step.

    It takes the nextn with the most expected tokens per second. Now and then it tries another one,
    if what it may find out is worth more than the trial, and if trials have lost little so far.
    The choice depends on times and accepted drafts, never on the drafts that it drops, so sampled
    texts keep their distribution.
    """

    def __init__(self, most: int, times: StepTimes | None = None) -> None:
        self._most, self._times = most, times or StepTimes(most)
        self._model = AcceptanceModel(most)
        self._beliefs: dict[Hashable, Belief] = {}
        self._credit = 0.0  # seconds that trials may lose now
        self._trial_left = 0  # steps for which a trial goes on, whatever they show
        self._last: NextnChoice | None = None

    def launch(self, programs: Programs, running: Running, active: Bools, rows: int) -> ReadOutput:
        requests = [request for _, request in running]
        sampling = sum(request.controls.temperature > 0 for request in requests)
        size = StepSize(running[-1][0] + 1, sum(r.length for r in requests), sampling)
        left = {r: r.params.max_tokens - len(r.token_ids) for r in requests}
        nextn = self.choose(left, size)
        cast(Adaptive, programs).draft(nextn)
        start = time.perf_counter()
        read_output = super().launch(programs, running, active, rows)
        self.record_time(size, time.perf_counter() - start)
        return read_output

    def choose(self, left: Mapping[Any, int], size: StepSize) -> int:
        """Choose the next step's nextn. left: each request and the tokens it may still emit."""
        times, last = self._times.seconds(size), self._last
        self._settle(left, float(times[0]))
        self._beliefs = {request: self._beliefs.get(request, PRIOR) for request in left}
        beliefs = np.sum([*self._beliefs.values()], 0)
        expected = beliefs @ self._model.tokens
        rates = expected / times
        if last is not None:
            rates[last.best] *= SWITCH_GAIN
        best = int(rates.argmax())
        rate = float(expected[best] / times[best])
        trial = self._choose_trial(beliefs, best, times, max(left.values()))
        self._last = NextnChoice(best if trial is None else trial, best, rate)
        return self._last.nextn

    def record_time(self, size: StepSize, seconds: float) -> None:
        """Record the time of the step whose nextn was chosen last."""
        assert self._last is not None
        self._last.seconds = seconds
        self._times.correct(size, self._last.nextn, seconds)

    def add(self, request: Hashable, accepted: int, drafted: int) -> None:
        """Record the acceptance of a request's drafts in the last step."""
        assert self._last is not None
        self._last.tokens += accepted + 1
        self._beliefs[request] = self._model.update(self._beliefs[request], accepted, drafted)

    def _settle(self, left: Mapping[Any, int], step_seconds: float) -> None:
        """Update the credit: each step and new request adds to it, and trials take what they lost.

        step_seconds: of a step without drafts.
        """
        if (last := self._last) is not None:
            self._credit += TRIAL_SHARE * last.seconds
            if last.nextn != last.best:
                self._credit -= last.seconds - last.tokens / last.rate
        for request, tokens in left.items():
            if request not in self._beliefs:
                self._credit += TRIAL_SHARE * min(tokens, HORIZON) * step_seconds / len(left)

    def _choose_trial(self, beliefs: Belief, best: int, times: Seconds, left: int) -> int | None:
        """Return a nextn above the best that is worth a trial; None if there is none.

        beliefs: their sum over requests. left: tokens of the longest answer.
        """
        last = self._last
        tried = last.nextn if last is not None and last.nextn != last.best else None
        if tried is not None and best >= tried:  # the trial has shown that it pays
            self._credit, tried = max(self._credit, 0.0), None
        if best == self._most:
            self._trial_left = 0
            return None
        if self._trial_left and tried is not None:
            self._trial_left -= 1
            return tried
        tokens, above = self._model.tokens, slice(best + 1, None)
        expected = beliefs @ tokens
        rate = float(expected[best] / times[best])
        loss = np.maximum(times[above] - expected[above] / rate, 0)
        loss = times[above] - times[best] + TRIAL_STEPS * loss
        affordable = loss <= self._credit
        if tried is not None and self._credit > 0:
            affordable[tried - best - 1] = True
        if not affordable.any():  # as in most steps: what trials may gain need not be computed
            return None
        # If the levels were known, then the requests of which levels would gain how much?
        gained = tokens[:, above] / times[above] - (tokens[:, best] / times[best])[:, None]
        gain = beliefs @ np.maximum(gained, 0) / rate * min(left, HORIZON) * beliefs.sum() / rate
        worth = gain / np.maximum(loss, 1e-9)
        choice = int(np.where(affordable, worth, 0).argmax())
        if not affordable[choice] or worth[choice] <= TRIAL_GAIN:
            # A long time without trials is no reason for many at once.
            self._credit = min(self._credit, 2 * float(loss[int(worth.argmax())]))
            return None
        nextn = best + 1 + choice
        if nextn != tried:
            self._trial_left = TRIAL_STEPS
        return nextn
