"""The loop: admit, step, hand out tokens. Speculative decoding is all inside the step program."""

from dataclasses import dataclass

import numpy as np

from mtpbuild.runtime.adaptive import AdaptiveNextn
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.pace import Land, OverlappingPace, Pace, Running
from mtpbuild.runtime.programs.base import Overlapping, Programs, StepOutput
from mtpbuild.runtime.request import Request, TokenLogprobs
from mtpbuild.runtime.scheduler import Scheduler
from mtpbuild.runtime.stats import Acceptance, AcceptanceWatch


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched: for which requests, in which slots, and how to get its output."""

    requests: Running
    land: Land


class Loop:
    """Drives an engine's programs for the requests of a scheduler; for one thread at a time.

    Where the programs can (and `overlap` lets them) the next step is launched before the last
    one's tokens are read: the host's work costs no time, and a request that ends has been given a
    step too many, whose tokens are dropped.
    """

    def __init__(self, programs: Programs, manifest: Manifest, *, overlap: bool = True) -> None:
        build = manifest.build
        self.programs = programs
        self.scheduler = Scheduler(build.slots, build.ranks.serving)
        self.acceptance = Acceptance(build.nextn)
        self.requests = self.prompt_tokens = 0
        self._watch = AcceptanceWatch(0 if build.drafter == "none" else build.nextn)
        self._pace = AdaptiveNextn(build.nextn) if build.adaptive else Pace()
        if overlap and isinstance(programs, Overlapping):
            self._pace = OverlappingPace()
        self._window, self._chunk = manifest.window, build.prefill_chunk
        self._flight: Flight | None = None

    def step(self) -> None:
        """One decode step of all running requests; waiting ones move into free slots before it."""
        for slot, request in self.scheduler.admit():
            self._prefill(slot, request)
        for source, target in self.scheduler.close_gaps():
            self.programs.move(source, target)
        last, self._flight = self._flight, None
        if running := self.scheduler.running:
            self._flight = self._launch(running, last)
        if last:
            self._hand_out(last)
        if self._flight and not self._pace.ahead:
            self._hand_out(self._flight)
            self._flight = None

    def fail(self, error: EngineError) -> None:
        """End all requests with an error; a step in flight is forgotten."""
        self._flight = None
        self.scheduler.fail(error)

    def _launch(self, running: Running, last: Flight | None) -> Flight:
        """Begin a step. `last` is the step before it, if its tokens are still unknown."""
        unknown = {request for _, request in last.requests} if last else set[Request]()
        lengths = (r.length + (self._window if r in unknown else 0) for _, r in running)
        active, rows = self.scheduler.active, max(lengths) + self._window
        return Flight(running, self._pace.launch(self.programs, running, active, rows))

    def _hand_out(self, flight: Flight) -> None:
        """Wait for a step, and give its tokens to those of its requests that have not ended."""
        output = flight.land()
        tokens, counts = output.tokens.tolist(), output.num_tokens.tolist()
        drafts = output.num_drafts.tolist()
        for slot, request in flight.requests:
            if request.ended:
                continue
            if request.observer:
                request.observer.step(request, output, slot)
            logprobs = request.params.logprobs
            found = () if logprobs is None else _alternatives(output, slot, logprobs)
            request.receive(tokens[slot][: counts[slot]], drafts[slot], found)
            judged = counts[slot] - 1, drafts[slot]
            self.acceptance.add(*judged)
            self._watch.add(*judged)
            self._pace.add(request, *judged)

    def _prefill(self, slot: int, request: Request) -> None:
        """Fill the slot's caches with the prompt but its last token, the first step's newest."""
        request.start()
        self.requests += 1
        self.prompt_tokens += len(request.prompt)
        last, ahead = len(request.prompt) - 1, self.programs.lookahead
        tokens = np.array(request.prompt + [0] * ahead, np.int64)
        for start in range(0, last, self._chunk):
            if request.cancelled:
                break
            end = min(start + self._chunk, last)
            self.programs.prefill(slot, start, tokens[start : end + ahead])
        self.programs.begin(slot, last, request.prompt[last], request.controls)


def _alternatives(output: StepOutput, slot: int, count: int) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens that a slot emitted, each with the `count` likeliest."""
    assert output.top_ids is not None, "only the mixed program has alternatives"
    assert output.top_logprobs is not None
    given = (output.tokens[slot], output.logprobs[slot])
    tops = (output.top_ids[slot, :, :count], output.top_logprobs[slot, :, :count])
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(*(x.tolist() for x in (*given, *tops)), strict=True)
        if token >= 0
    ]
