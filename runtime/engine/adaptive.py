"""The choice of the number of drafts per step, from acceptance and step times."""

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from mtpbuild.runtime.contract.programs import Adaptive, Bools, Floats, Programs
from mtpbuild.runtime.engine.acceptance import AcceptanceModel, Belief
from mtpbuild.runtime.engine.launcher import ReadOutput, Running, StepLauncher
from mtpbuild.runtime.engine.step_times import Seconds, StepSize, StepTimes

SWITCH_GAIN = 1.03  # required gain of a change, as the change's own step verifies fewer drafts
TRIAL_SHARE = 0.01  # most of a request's time that trials may lose
TRIAL_STEPS = 2  # steps of a trial after its first one, which has too few drafts to verify
TRIAL_GAIN = 3.0  # required expected gain of a trial, over what it is expected to lose
# A trial's result is used for this many tokens at most, as texts change; and a new request's share
# of trials is reckoned for this many tokens at most, as most requests end long before `max_tokens`.
HORIZON = 200
# What a trial finds out about step times is used by later requests, too, for so many tokens. It is
# found out that a step takes less by LUCK deviations, with the probability LUCK_SHARE.
TIMES_HORIZON, LUCK, LUCK_SHARE = 1000, 3**0.5, 1 / 6


@dataclass(slots=True)
class NextnChoice:
    """The nextn of a step; best: the one with the most tokens per second, as far as is known."""

    nextn: int
    best: int
    verified: int  # drafts that the step could verify


class AdaptiveNextn(StepLauncher):
    """The choice and timing of each step's nextn, for the requests that share the step.

    It takes the nextn with the most expected tokens per second. Now and then it tries another one,
    if what it may find out is worth more than the trial, and if trials have lost little so far.
    The choice depends on times and accepted drafts, never on the drafts that it drops, so sampled
    texts keep their distribution.
    """

    def __init__(self, max_nextn: int, times: StepTimes | None = None) -> None:
        self._max_nextn, self._times = max_nextn, times or StepTimes(max_nextn)
        self._model = AcceptanceModel(max_nextn)
        self._beliefs: dict[Hashable, Belief] = {}
        self._credit = 0.0  # what trials may lose now, in steps without drafts
        self._trial_left = 0  # steps for which a trial goes on, whatever they show
        self._last = NextnChoice(max_nextn, max_nextn, max_nextn)

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

    @property
    def idle_work(self) -> bool:  # type: ignore[override]
        return self._times.refuted

    def work_idle(self, programs: Programs) -> None:
        self._times.measure_again(cast(Adaptive, programs))

    def close(self) -> None:
        self._times.keep()

    def choose(self, left: Mapping[Any, int], size: StepSize) -> int:
        """Choose the next step's nextn. left: each request and the tokens it may still emit."""
        times, last = self._times.seconds(size), self._last
        times /= times[0]
        new = [tokens for request, tokens in left.items() if request not in self._beliefs]
        for request in self._beliefs.keys() - left.keys():
            self._model.end_request(self._beliefs[request])
        prior = self._model.prior
        self._beliefs = {request: self._beliefs.get(request, prior) for request in left}
        beliefs = np.sum([*self._beliefs.values()], 0)
        expected = beliefs @ self._model.tokens
        rates = expected / times
        self._credit += TRIAL_SHARE * sum(min(tokens, HORIZON) for tokens in new) / len(left)
        self._settle(last, times, expected, float(rates.max()))
        rates[last.best] *= SWITCH_GAIN
        best = int(rates.argmax())
        trial = self._choose_trial(beliefs, best, times, max(left.values()))
        nextn = best if trial is None else trial
        self._last = NextnChoice(nextn, best, min(nextn, last.nextn))
        return nextn

    def record_time(self, size: StepSize, seconds: float) -> None:
        """Record the time of the step whose nextn was chosen last."""
        self._times.correct(size, self._last.nextn, seconds)

    def add(self, request: Hashable, accepted: int, drafted: int) -> None:
        """Record the acceptance of a request's drafts in the last step."""
        self._beliefs[request] = self._model.update(self._beliefs[request], accepted, drafted)

    def _settle(self, last: NextnChoice, times: Seconds, expected: Floats, rate: float) -> None:
        """Add the last step's share to the credit, and subtract what its trial or change lost.

        The loss is the step's time less the time in which the best nextn gives as many tokens. The
        tokens are the expected ones, as those of a single step tell little. rate: expected tokens
        of the best nextn per unit of time, which is a step without drafts.
        """
        self._credit += TRIAL_SHARE * float(times[last.nextn])
        if last.nextn != last.best or last.verified < last.nextn:
            self._credit -= float(times[last.nextn] - expected[last.verified] / rate)

    def _choose_trial(self, beliefs: Belief, best: int, times: Seconds, left: int) -> int | None:
        """Return another nextn than the best that is worth a trial; None if there is none.

        beliefs: their sum over requests. left: tokens of the longest answer.
        """
        last = self._last
        tried = last.nextn if last.nextn != last.best else None
        if self._trial_left and tried is not None:
            self._trial_left -= 1
            return tried
        tokens, more = self._model.tokens, np.arange(self._max_nextn + 1) > best
        expected = beliefs @ tokens
        rate = float(expected[best] / times[best])
        loss = np.maximum(times - expected / rate, 0)
        # A step of a change up has too few drafts to verify, as has the one of the change back.
        change = np.where(more, times - times[best], (expected[best] - expected) / rate)
        loss = np.maximum(change, 0) + TRIAL_STEPS * loss
        affordable = loss <= self._credit
        if tried is not None and self._credit > 0:
            affordable[tried] = True
        # If the levels were known, then the requests of which levels would gain how much? Steps
        # with fewer drafts tell nothing about levels.
        gained = tokens / times - (tokens[:, best] / times[best])[:, None]
        gain = beliefs @ np.maximum(gained, 0) * more * min(left, HORIZON)
        # And if a step took less than was expected?
        doubts = self._times.doubts(best if tried is None else tried)
        lucky = expected / times * np.exp(LUCK * doubts) - rate
        gain += LUCK_SHARE * np.maximum(lucky, 0) * TIMES_HORIZON
        worth = gain / rate * beliefs.sum() / rate / np.maximum(loss, 1e-9)
        worth[best] = 0
        choice = int(np.where(affordable, worth, 0).argmax())
        if not affordable[choice] or worth[choice] <= TRIAL_GAIN:
            # A long time without trials is no reason for many at once.
            self._credit = min(self._credit, 2 * float(loss[int(worth.argmax())]))
            return None
        if choice != tried:
            self._trial_left = TRIAL_STEPS
        return choice
