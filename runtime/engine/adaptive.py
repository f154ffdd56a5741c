"""The choice of the number of drafts per step, from measured acceptance and step times."""

import time
from collections.abc import Hashable, Sequence
from statistics import median
from typing import cast

from mtpbuild.runtime.contract.programs import Adaptive, Bools, Programs
from mtpbuild.runtime.engine.launcher import ReadOutput, Running, StepLauncher

DECAY = 0.98  # weight that older drafts keep per new draft: a memory of about 50 drafts
IDLE_DECAY = 0.995  # the same for a step without that draft; slower, since a new trial costs time
PRIOR_WEIGHT = 2.0  # the prior counts as this many drafts
PRIOR_RATE = 0.7  # prior acceptance rate of the first draft
INHERITED_WEIGHT = 0.5  # a new request's inherited statistics count as this many drafts
OPTIMISM = 0.25  # accepted drafts that are added to these, so that every position is tried
SETTLING_STEPS = 6  # untimed steps after a change of program, while caches are cold
TIMED_STEPS = 4  # timed steps of a nextn before its time is known
# Learning rates per step: of the times of all nextn, and of the step's own nextn.
SHARED_RATE, OWN_RATE = 0.08, 0.02
SWITCH_GAIN = 1.05  # required gain of a change, since a new program needs settling steps
RETIMING_INTERVAL = 300  # steps between new measurements of a nextn that is not in use
RETIMING_FACTOR = 1.3  # a measured nextn is measured again if this factor would make it the best


class AcceptanceEstimate:
    """A request's acceptance statistics by draft position; recent steps weigh most."""

    def __init__(self, nextn: int) -> None:
        self.judged = [0.0] * nextn  # steps that accepted all drafts before this one
        self.accepted = [0.0] * nextn

    def add(self, accepted: int, drafted: int) -> None:
        """Count a step that accepted `accepted` of its `drafted` drafts."""
        tried = min(accepted + 1, drafted)
        for i in range(len(self.judged)):
            decay = DECAY if i < tried else IDLE_DECAY
            self.judged[i] = self.judged[i] * decay + (i < tried)
            self.accepted[i] = self.accepted[i] * decay + (i < accepted)

    def tokens(self) -> list[float]:
        """Return the expected tokens [nextn + 1] of a step that drafts 0, 1, .. nextn.

        A position's prior is the estimate of the position before it. If a position is not tried
        for long, its estimate decays to the prior, so that it is tried again.
        """
        chance, reached, expected = PRIOR_RATE, 1.0, [1.0]
        for judged, accepted in zip(self.judged, self.accepted, strict=True):
            chance = (accepted + PRIOR_WEIGHT * chance) / (judged + PRIOR_WEIGHT)
            reached *= chance
            expected.append(expected[-1] + reached)
        return expected

    def successor(self) -> "AcceptanceEstimate":
        """Return a new request's statistics: these at INHERITED_WEIGHT, plus OPTIMISM."""
        new = AcceptanceEstimate(len(self.judged))
        for i, judged in enumerate(self.judged):
            share = min(1.0, INHERITED_WEIGHT / judged) if judged else 0.0
            new.judged[i] = judged * share + OPTIMISM
            new.accepted[i] = self.accepted[i] * share + OPTIMISM
        return new


class StepTimes:
    """The measured or estimated seconds of a step, by nextn.

    The largest nextn and half of it are measured first; the times of the others are interpolated
    until they are measured too. Each later step scales all times quickly, since machine speed and
    context length affect all of them, and its own nextn's time slowly. A nextn that is not chosen
    may thus keep a wrong time, so now and then another nextn is measured again.
    """

    def __init__(self, nextn: int) -> None:
        self._trials: list[list[float]] = [[] for _ in range(nextn + 1)]
        self._wanted = [nextn, nextn // 2]  # nextn to measure first, then also one to retime
        self._timed = [0] * (nextn + 1)  # the number of the last step of each nextn
        self._steps = self._last_retiming = 0  # steps so far; their number at the last retiming
        self.seconds: list[float] = []  # of every nextn; empty until the first two are measured

    def next_unmeasured(self) -> int | None:
        """Return a nextn that must be measured before any comparison, the largest first."""
        return next((k for k in self._wanted if len(self._trials[k]) < TIMED_STEPS), None)

    def schedule_retiming(self, speeds: Sequence[float]) -> None:
        """Schedule a new measurement of a nextn that may be faster than the best one.

        Of several candidates, the nextn that was measured longest ago is chosen.
        """
        if self._steps - self._last_retiming < RETIMING_INTERVAL:
            return
        best = max(speeds)
        slower = [k for k, speed in enumerate(speeds) if speed < best]
        estimated = {k for k in slower if len(self._trials[k]) < TIMED_STEPS}
        near = {k for k in slower if speeds[k] > best / RETIMING_FACTOR}
        if candidates := estimated | near:
            oldest = min(sorted(candidates), key=self._timed.__getitem__)
            self._wanted[2:], self._trials[oldest], self._last_retiming = [oldest], [], self._steps

    def add(self, nextn: int, seconds: float) -> None:
        trials = self._trials[nextn]
        self._steps += 1
        self._timed[nextn] = self._steps
        if len(trials) < TIMED_STEPS:
            trials.append(seconds)
            if self.seconds and len(trials) == TIMED_STEPS:
                self.seconds[nextn] = median(trials)
            elif not self.seconds and self.next_unmeasured() is None:
                self.seconds = self._interpolate()
            return
        if not self.seconds:
            return
        ratio = min(max(seconds / self.seconds[nextn], 0.5), 2.0)  # a step may be interrupted
        self.seconds = [s * ratio**SHARED_RATE for s in self.seconds]
        self.seconds[nextn] *= ratio**OWN_RATE

    def _interpolate(self) -> list[float]:
        most, half = self._wanted
        high, low = (min(self._trials[k]) for k in self._wanted)
        slope = max(high - low, 0.0) / max(most - half, 1)
        return [max(low + slope * (k - half), low / 4) for k in range(most + 1)]


class AdaptiveNextn(StepLauncher):
    """The choice and timing of each step's nextn, for the requests that share the step.

    The choice depends on times and accepted drafts, never on the drafts that it drops, so sampled
    texts keep their distribution.
    """

    def __init__(self, most: int) -> None:
        self._most = self._nextn = most
        self._settled = 0  # consecutive steps of this nextn so far
        self._estimates: dict[Hashable, AcceptanceEstimate] = {}
        self._all = AcceptanceEstimate(most)  # of all requests; a new request starts from it
        self._times: dict[Hashable, StepTimes] = {}

    def launch(self, programs: Programs, running: Running, active: Bools, rows: int) -> ReadOutput:
        requests = [request for _, request in running]
        kind = running[-1][0], all(request.controls.plain for request in requests)
        cast(Adaptive, programs).draft(self.choose(requests, kind))
        start = time.perf_counter()
        read_output = super().launch(programs, running, active, rows)
        self.record_time(kind, time.perf_counter() - start)
        return read_output

    def choose(self, requests: Sequence[Hashable], kind: Hashable) -> int:
        """Choose the next step's nextn; steps of equal `kind` and nextn take equally long."""
        self._estimates = {r: self._estimates.get(r) or self._all.successor() for r in requests}
        times = self._times.setdefault(kind, StepTimes(self._most))
        nextn = times.next_unmeasured()
        if nextn is None:
            nextn = self._fastest(times)
        self._settled = self._settled + 1 if nextn == self._nextn else 0
        self._nextn = nextn
        return nextn

    def record_time(self, kind: Hashable, seconds: float) -> None:
        """Record the time of the step whose nextn was chosen last."""
        if self._settled >= SETTLING_STEPS:
            self._times[kind].add(self._nextn, seconds)

    def add(self, request: Hashable, accepted: int, drafted: int) -> None:
        """Record the acceptance of a request's drafts in the last step."""
        for estimate in (self._estimates[request], self._all):
            estimate.add(accepted, drafted)

    def _fastest(self, times: StepTimes) -> int:
        expected = zip(*(estimate.tokens() for estimate in self._estimates.values()), strict=True)
        speeds = [sum(tokens) / s for tokens, s in zip(expected, times.seconds, strict=True)]
        times.schedule_retiming(speeds)
        speeds[self._nextn] *= SWITCH_GAIN
        return max(range(len(speeds)), key=speeds.__getitem__)
