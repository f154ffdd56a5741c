"""The loop: admit, step, hand out tokens. Speculative decoding is all inside the step program."""

import numpy as np

from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.programs.base import Programs, StepOutput
from mtpbuild.runtime.request import Request, TokenLogprobs
from mtpbuild.runtime.scheduler import Scheduler
from mtpbuild.runtime.stats import Acceptance, AcceptanceWatch


class Loop:
    """Drives an engine's programs for the requests of a scheduler; for one thread at a time."""

    def __init__(self, programs: Programs, manifest: Manifest) -> None:
        self.programs = programs
        self.scheduler = Scheduler(manifest.build.max_batch)
        self.acceptance = Acceptance(manifest.build.nextn)
        self.requests = self.prompt_tokens = 0
        nothing_drafted = manifest.build.drafter == "none"
        self._watch = AcceptanceWatch(0 if nothing_drafted else manifest.build.nextn)
        self._window = manifest.window
        self._chunk = manifest.build.prefill_chunk

    def step(self) -> None:
        """One decode step of all running requests; waiting ones move into free slots before it."""
        for slot, request in self.scheduler.admit():
            self._prefill(slot, request)
        for source, target in self.scheduler.close_ranks():
            self.programs.move(source, target)
        running = self.scheduler.running
        if not running:
            return
        rows = max(request.length for _, request in running) + self._window
        output = self.programs.step(self.scheduler.active, rows)
        tokens, counts = output.tokens.tolist(), output.num_tokens.tolist()
        drafts = output.num_drafts.tolist()
        for slot, request in running:
            if request.observer:
                request.observer.step(request, output, slot)
            logprobs = request.params.logprobs
            found = () if logprobs is None else _alternatives(output, slot, logprobs)
            request.receive(tokens[slot][: counts[slot]], drafts[slot], found)
            self.acceptance.add(counts[slot] - 1, drafts[slot])
            self._watch.add(counts[slot] - 1, drafts[slot])

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
    """Of each token that a slot emitted, beside the `count` most probable ones."""
    assert output.top_ids is not None, "only the mixed program has alternatives"
    assert output.top_logprobs is not None
    given = (output.tokens[slot], output.logprobs[slot])
    tops = (output.top_ids[slot, :, :count], output.top_logprobs[slot, :, :count])
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(*(x.tolist() for x in (*given, *tops)), strict=True)
        if token >= 0
    ]
