"""Decides how many tokens to draft, by the acceptance and the step times seen so far."""

import time
from collections.abc import Hashable, Sequence
from statistics import median
from typing import cast

from mtpbuild.runtime.contract.programs import Adaptive, Bools, Programs
from mtpbuild.runtime.pace import Land, Pace, Running

FORGET = 0.98  # weight of older drafts as a new one is judged: a memory of some 50
FADE = 0.995  # the same in a step without a draft there; more patient, as trying again costs time
DOUBT = 2.0  # drafts that a guess weighs as much as
FIRST_GUESS = 0.7  # that a first draft is accepted
CARRIED = 0.5  # drafts that a new request's odds weigh; they are those of the last ones
HOPE = 0.25  # drafts that they take for right, so that some are tried whatever those showed
SETTLING = 6  # steps of a program that find cold caches after another one ran: not timed
TRIALS = 4  # timed steps of a nextn before its time is known
DRIFT, OWN = 0.08, 0.02  # how fast all times follow a step's, and how fast its own nextn's does
STAY = 1.05  # another nextn must be so much better, for its program has to settle first
AGAIN = 300  # steps until the time of another nextn is measured anew,
CLOSE = 1.3  # if the best one is not so much better, or if that time was a guess


class Odds:
    """Tells how likely a request's drafts are accepted, by position; recent steps count most."""

    def __init__(self, nextn: int) -> None:
        self.judged = [0.0] * nextn  # steps in which the drafts before this one were accepted
        self.accepted = [0.0] * nextn

    def add(self, accepted: int, drafted: int) -> None:
        """Counts a step, which accepted `accepted` of its `drafted` drafts."""
        tried = min(accepted + 1, drafted)
        for i in range(len(self.judged)):
            kept = FORGET if i < tried else FADE
            self.judged[i] = self.judged[i] * kept + (i < tried)
            self.accepted[i] = self.accepted[i] * kept + (i < accepted)

    def tokens(self) -> list[float]:
        """[nextn + 1] expected tokens of a step that drafts 0, 1, .. nextn.

        A position that was not tried for long is guessed to be as good as the one before it: so
        it is tried again, once the evidence against it has faded.
        """
        chance, reached, expected = FIRST_GUESS, 1.0, [1.0]
        for judged, accepted in zip(self.judged, self.accepted, strict=True):
            chance = (accepted + DOUBT * chance) / (judged + DOUBT)
            reached *= chance
            expected.append(expected[-1] + reached)
        return expected

    def successor(self) -> "Odds":
        """Returns a new request's, which lean to these, and have a little hope besides."""
        new = Odds(len(self.judged))
        for i, judged in enumerate(self.judged):
            share = min(1.0, CARRIED / judged) if judged else 0.0
            new.judged[i] = judged * share + HOPE
            new.accepted[i] = self.accepted[i] * share + HOPE
        return new


class Times:
    """Knows the seconds of a step, by nextn.

    Two are tried, the others lie on the line through these until they were chosen themselves.
    Ratios are then corrected slowly; how fast the machine is and how long the contexts are, which
    concerns all, is followed quickly. So a wrong ratio would stay nearly as it is while one nextn
    is chosen: now and then another one is timed anew.
    """

    def __init__(self, nextn: int) -> None:
        self._trials: list[list[float]] = [[] for _ in range(nextn + 1)]
        self._wanted = [nextn, nextn // 2]  # to be tried, the first two and the last one
        self._timed = [0] * (nextn + 1)  # the last step of each
        self._steps = self._doubted = 0  # how many there were, and when one was tried anew
        self.seconds: list[float] = []  # of every nextn, once these were tried

    def untried(self) -> int | None:
        """Returns the nextn that wants a trial before any other is judged; the largest first."""
        return next((k for k in self._wanted if len(self._trials[k]) < TRIALS), None)

    def doubt(self, speeds: Sequence[float]) -> None:
        """Lets one that may be better than the best nextn be tried anew, the one timed first."""
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
        ratio = min(max(seconds / self.seconds[nextn], 0.5), 2.0)  # one step may be interrupted
        self.seconds = [s * ratio**DRIFT for s in self.seconds]
        self.seconds[nextn] *= ratio**OWN

    def _line(self) -> list[float]:
        most, half = self._wanted
        high, low = (min(self._trials[k]) for k in self._wanted)
        slope = max(high - low, 0.0) / max(most - half, 1)
        return [max(low + slope * (k - half), low / 4) for k in range(most + 1)]


class AdaptiveNextn(Pace):
    """Chooses each step's nextn for the requests that share it, and times the step.

    Exact whatever it chooses: it looks at tokens that are out, never at the drafts that it drops.
    """

    def __init__(self, most: int) -> None:
        self._most = self._nextn = most
        self._settled = 0  # steps of this nextn in a row
        self._odds: dict[Hashable, Odds] = {}
        self._all = Odds(most)  # of all requests: where a new one begins
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
        """Chooses the next step's nextn; steps of one `kind` and nextn take equally long."""
        self._odds = {r: self._odds.get(r) or self._all.successor() for r in requests}
        times = self._times.setdefault(kind, Times(self._most))
        nextn = times.untried()
        if nextn is None:
            nextn = self._best(times)
        self._settled = self._settled + 1 if nextn == self._nextn else 0
        self._nextn = nextn
        return nextn

    def took(self, kind: Hashable, seconds: float) -> None:
        """Learn how long the step took whose nextn was chosen last."""
        if self._settled >= SETTLING:
            self._times[kind].add(self._nextn, seconds)

    def add(self, request: Hashable, accepted: int, drafted: int) -> None:
        """Learn what became of a request's drafts in that step."""
        for odds in (self._odds[request], self._all):
            odds.add(accepted, drafted)

    def _best(self, times: Times) -> int:
        expected = zip(*(odds.tokens() for odds in self._odds.values()), strict=True)
        speeds = [sum(tokens) / s for tokens, s in zip(expected, times.seconds, strict=True)]
        times.doubt(speeds)
        speeds[self._nextn] *= STAY
        return max(range(len(speeds)), key=speeds.__getitem__)
