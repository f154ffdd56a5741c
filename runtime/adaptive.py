"""The choice of the number of drafts per step, from measured acceptance and step times."""

import time
from collections.abc import Hashable, Sequence
from statistics import median
from typing import cast

from mtpbuild.runtime.contract.programs import Adaptive, Bools, Programs
from mtpbuild.runtime.pace import Land, Pace, Running

FORGET = 0.98  # weight that older drafts keep per new one: a memory of about 50 drafts
FADE = 0.995  # the same per step without a draft there; slower, since a new trial costs time
DOUBT = 2.0  # number of drafts that the prior weighs as much as
FIRST_GUESS = 0.7  # prior acceptance rate of the first draft
CARRIED = 0.5  # number of drafts that a new request's inherited statistics weigh
HOPE = 0.25  # accepted drafts that are added to them, so that every position is tried
SETTLING = 6  # untimed steps after a change of program, while caches are cold
TRIALS = 4  # timed steps of a nextn before its time is known
DRIFT, OWN = 0.08, 0.02  # learning rates, from one step: of all times, and of the step's own nextn
STAY = 1.05  # required gain before a change of nextn, since a new program needs settling steps
AGAIN = 300  # steps before another nextn is timed again,
CLOSE = 1.3  # if its speed is within this factor of the best or its time is an estimate


class Odds:
    """A request's acceptance statistics by draft position; recent steps weigh most."""

    def __init__(self, nextn: int) -> None:
        self.judged = [0.0] * nextn  # steps in which the drafts before this one were accepted
        self.accepted = [0.0] * nextn

    def add(self, accepted: int, drafted: int) -> None:
        """Count a step that accepted `accepted` of its `drafted` drafts."""
        tried = min(accepted + 1, drafted)
        for i in range(len(self.judged)):
            kept = FORGET if i < tried else FADE
            self.judged[i] = self.judged[i] * kept + (i < tried)
            self.accepted[i] = self.accepted[i] * kept + (i < accepted)

    def tokens(self) -> list[float]:
        """Return the expected tokens [nextn + 1] of a step that drafts 0, 1, .. nextn.

        The prior of a position is the estimate of the one before it. A position that was not tried
        for long returns to its prior as its evidence fades, and is then tried again.
        """
        chance, reached, expected = FIRST_GUESS, 1.0, [1.0]
        for judged, accepted in zip(self.judged, self.accepted, strict=True):
            chance = (accepted + DOUBT * chance) / (judged + DOUBT)
            reached *= chance
            expected.append(expected[-1] + reached)
        return expected

    def successor(self) -> "Odds":
        """Return the initial statistics of a new request: these with less weight, plus HOPE."""
        new = Odds(len(self.judged))
        for i, judged in enumerate(self.judged):
            share = min(1.0, CARRIED / judged) if judged else 0.0
            new.judged[i] = judged * share + HOPE
            new.accepted[i] = self.accepted[i] * share + HOPE
        return new


class Times:
    """The measured or estimated seconds of a step, by nextn.

    The largest nextn and half of it are measured first. The others are on the line through these
    until they are measured themselves. Each step then moves all times quickly, since machine speed
    and context length affect all of them, and its own nextn's ratio slowly. A wrong ratio would
    last while one nextn is chosen, so now and then another nextn is measured again.
    """

    def __init__(self, nextn: int) -> None:
        self._trials: list[list[float]] = [[] for _ in range(nextn + 1)]
        self._wanted = [nextn, nextn // 2]  # nextn to measure: the first two, then a repeated one
        self._timed = [0] * (nextn + 1)  # the number of the last step of each
        self._steps = self._doubted = 0  # steps so far, and the step of the last `doubt`
        self.seconds: list[float] = []  # of every nextn, once the first two are measured

    def untried(self) -> int | None:
        """Return a nextn that must be measured before any comparison, the largest first."""
        return next((k for k in self._wanted if len(self._trials[k]) < TRIALS), None)

    def doubt(self, speeds: Sequence[float]) -> None:
        """Schedule a new measurement of a nextn that may be faster than the best one.

        Of several candidates it is the one that was measured longest ago.
        """
        if self._steps - self._doubted < AGAIN:
            return
        best, guessed = max(speeds), (len(trials) < TRIALS for trials in self._trials)
        every = enumerate(zip(speeds, guessed, strict=True))
        others = [k for k, (s, guess) in every if s < best and (guess or s * CLOSE > best)]
        if others:
            oldest = min(others, key=self._timed.__getitem__)
            self._wanted[2:], self._trials[oldest], self._doubted = [oldest], [], self._steps

    def add(self, nextn: int, seconds: float) -> None:
        trials = self._trials[nextn]
        self._steps += 1
        self._timed[nextn] = self._steps
        if len(trials) < TRIALS:
            trials.append(seconds)
            if self.seconds and len(trials) == TRIALS:
                self.seconds[nextn] = median(trials)
            elif not self.seconds and self.untried() is None:
                self.seconds = self._line()
            return
        if not self.seconds:
            return
        ratio = min(max(seconds / self.seconds[nextn], 0.5), 2.0)  # a step may be interrupted
        self.seconds = [s * ratio**DRIFT for s in self.seconds]
        self.seconds[nextn] *= ratio**OWN

    def _line(self) -> list[float]:
        most, half = self._wanted
        high, low = (min(self._trials[k]) for k in self._wanted)
        slope = max(high - low, 0.0) / max(most - half, 1)
        return [max(low + slope * (k - half), low / 4) for k in range(most + 1)]


class AdaptiveNextn(Pace):
    """The choice and timing of each step's nextn, for the requests that share the step.

    The output is unaffected: the choice depends on emitted tokens and times, never on the drafts
    that it drops.
    """

    def __init__(self, most: int) -> None:
        self._most = self._nextn = most
        self._settled = 0  # consecutive steps of this nextn
        self._odds: dict[Hashable, Odds] = {}
        self._all = Odds(most)  # of all requests; a new request starts from it
        self._times: dict[Hashable, Times] = {}

    def launch(self, programs: Programs, running: Running, active: Bools, rows: int) -> Land:
        requests = [request for _, request in running]
        kind = running[-1][0], all(request.controls.plain for request in requests)
        cast(Adaptive, programs).draft(self.choose(requests, kind))
        start = time.perf_counter()
        land = super().launch(programs, running, active, rows)
        self.took(kind, time.perf_counter() - start)
        return land

    def choose(self, requests: Sequence[Hashable], kind: Hashable) -> int:
        """Choose the next step's nextn; steps of equal `kind` and nextn take equally long."""
        self._odds = {r: self._odds.get(r) or self._all.successor() for r in requests}
        times = self._times.setdefault(kind, Times(self._most))
        nextn = times.untried()
        if nextn is None:
            nextn = self._best(times)
        self._settled = self._settled + 1 if nextn == self._nextn else 0
        self._nextn = nextn
        return nextn

    def took(self, kind: Hashable, seconds: float) -> None:
        """Record the time of the step whose nextn was chosen last."""
        if self._settled >= SETTLING:
            self._times[kind].add(self._nextn, seconds)

    def add(self, request: Hashable, accepted: int, drafted: int) -> None:
        """Record the acceptance of a request's drafts in that step."""
        for odds in (self._odds[request], self._all):
            odds.add(accepted, drafted)

    def _best(self, times: Times) -> int:
        expected = zip(*(odds.tokens() for odds in self._odds.values()), strict=True)
        speeds = [sum(tokens) / s for tokens, s in zip(expected, times.seconds, strict=True)]
        times.doubt(speeds)
        speeds[self._nextn] *= STAY
        return max(range(len(speeds)), key=speeds.__getitem__)
