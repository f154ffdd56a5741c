"""The serving loop: fill in prompts, run steps, deliver their tokens to requests.

Host code for one request runs inside `request.contain()`, so an exception there fails that request
alone. An exception in a program's own run is a failure of the engine and ends all requests.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import (
    Constraining,
    Ints,
    Programs,
    Scores,
    Scoring,
    StepOutput,
)
from mtpbuild.runtime.engine.adaptive import AdaptiveNextn
from mtpbuild.runtime.engine.launcher import OverlappingLauncher, ReadOutput, Running, StepLauncher
from mtpbuild.runtime.engine.step_times import StepTimes
from mtpbuild.runtime.errors import (
    EngineError,
    NotFiniteError,
    RankError,
    StepError,
    running_program,
)
from mtpbuild.runtime.prefix_cache.cache import PrefixCache
from mtpbuild.runtime.requests.request import Request, TokenLogprobs
from mtpbuild.runtime.requests.scheduler import Filling, Scheduler
from mtpbuild.runtime.requests.stats import AcceptanceCounter, AcceptanceWatch

log = logging.getLogger("mtpbuild")


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was launched and whose output has not been read."""

    requests: Running
    read_output: ReadOutput


class Loop:
    """The loop that runs an engine's programs for its requests; for one thread at a time.

    If the programs can and `overlap` allows it, the next step is launched before the tokens of the
    last step are read. This hides the host's work. A request that ends then gets one step too many,
    whose tokens are dropped.
    """

    def __init__(
        self,
        programs: Programs,
        manifest: Manifest,
        *,
        overlap: bool = True,
        prefix_cache: PrefixCache | None = None,
        step_times: StepTimes | None = None,
        chunked_prefill_size: int | None = None,
    ) -> None:
        build = manifest.build
        self.programs = programs
        self.scheduler = Scheduler(build.slots, build.ranks.serving)
        self.prefix_cache = prefix_cache
        self.acceptance = AcceptanceCounter(build.nextn)
        self.num_requests = self.prompt_tokens = 0
        self.step_tokens: Counter[int] = Counter()  # tokens of a step, prompts' included -> steps
        self._tokens_now = 0  # the same number for the current step
        self._watch = AcceptanceWatch(quiet=build.drafter == "none")
        self._launcher = StepLauncher()
        if build.adaptive:
            self._launcher = AdaptiveNextn(build.nextn, step_times)
        elif overlap and Feature.OVERLAP in programs.features:
            self._launcher = OverlappingLauncher()
        self._window, self._chunk = manifest.window, build.prefill_chunk
        self._chunk_beside = min(chunked_prefill_size or self._chunk, self._chunk)
        self._launched: LaunchedStep | None = None

    def step(self) -> None:
        """Run a chunk of each rank's next prompt, and a decode step of all running requests."""
        self.release()
        if self.idle_work and self.scheduler.idle:
            self._launcher.work_idle(self.programs)
        self._close_gaps()
        for filling in self.scheduler.turns():
            self._fill(filling)
            if filling.request.ended:
                self.scheduler.drop(filling)
        self._close_gaps()  # a request that has just begun moves down
        last, self._launched = self._launched, None
        if running := self.scheduler.running:
            self._launched = self._launch(running, last)
        if last:
            self._deliver(last)
        if self._launched and not self._launcher.ahead:
            self._deliver(self._launched)
            self._launched = None
        if self._tokens_now:
            self.step_tokens[self._tokens_now] += 1
            self._tokens_now = 0

    @property
    def idle_work(self) -> bool:
        """Whether steps without requests have something to do."""
        return self._launcher.idle_work

    def forget(self) -> None:
        """Drop the cached rows of earlier prompts, but not the engine's own prefixes."""
        self.release()
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

    def close(self, error: EngineError) -> None:
        """Save the rows of ended requests, and end all others with an error."""
        if self._launched is None:
            with contextlib.suppress(StepError):  # all requests end anyhow
                self.release()
        self.fail(error)
        self._launcher.close()
        if self.prefix_cache is not None:
            self.prefix_cache.close()

    def fail(self, error: EngineError) -> None:
        """End all requests with an error; a step in flight is forgotten."""
        self._launched = None
        self.scheduler.fail(error)

    def release(self) -> None:
        """Free the slots of ended requests; save their rows, or clear those that are not finite."""
        for slot, request, rows in self.scheduler.release():
            if not self._has_finite_rows(slot, request, rows):
                if self.prefix_cache is not None:
                    self.prefix_cache.clear()  # other prompts may have begun with these rows
                with running_program():
                    self.programs.clear(slot)
            elif request.error is None and self.prefix_cache is not None:
                with _log_failed_save():
                    self.prefix_cache.save(slot, request.prompt + request.token_ids, rows, request)

    def _has_finite_rows(self, slot: int, request: Request, rows: int) -> bool:
        """Tell whether the rows that an ended request has filled are finite."""
        if isinstance(request.error, NotFiniteError):
            return False
        if request.token_ids or not rows:  # a step has checked them, or there are none
            return True
        with running_program():
            return self.programs.finite(slot, rows)

    def _launch(self, running: Running, last: LaunchedStep | None) -> LaunchedStep:
        """Launch a step. `last`: the step before it, if that step's tokens are not read yet."""
        unread = {request for _, request in last.requests} if last else set[Request]()
        self._constrain(running)
        lengths = (r.length + (self._window if r in unread else 0) for _, r in running)
        active, rows = self.scheduler.active, max(lengths) + self._window
        return LaunchedStep(running, self._launcher.launch(self.programs, running, active, rows))

    def _constrain(self, running: Running) -> None:
        """Give the step the constraints of all requests with a grammar."""
        for slot, request in running:
            if request.grammar is None:
                continue
            programs = cast(Constraining, self.programs)
            with request.contain():  # the step runs even if this fails; its tokens are dropped
                programs.constrain(
                    slot, request.grammar.make_next_constraint(programs.drafts(slot))
                )

    def _deliver(self, launched: LaunchedStep) -> None:
        """Wait for a step, and give its tokens to its requests that have not ended."""
        output = launched.read_output()
        tokens, counts = output.tokens.tolist(), output.num_tokens.tolist()
        for slot, request in launched.requests:
            if not request.ended:
                with request.contain():
                    self._deliver_to(request, output, slot, tokens[slot][: counts[slot]])

    def _deliver_to(
        self, request: Request, output: StepOutput, slot: int, tokens: list[int]
    ) -> None:
        """Give a request its tokens of a step."""
        if not output.finite(slot):
            raise _make_not_finite_error(f"after {len(request.token_ids)} tokens of the answer")
        if request.observer:
            request.observer.step(request, output, slot)
        count, row = request.params.logprobs, np.s_[slot, : len(tokens)]
        logprobs = () if count is None else _list_alternatives(tokens, output, row, count)
        accepted, drafted = len(tokens) - 1, int(output.num_drafts[slot])
        if not request.params.synthetic and request.params.temperature <= 1:
            self._watch.add(accepted, drafted)
        self._tokens_now += request.receive(tokens, drafted, logprobs, self.acceptance)
        self._launcher.add(request, accepted, drafted)
        if self.prefix_cache is not None:
            with _log_failed_save():
                self.prefix_cache.save_step(slot, request, len(tokens))

    def _fill(self, filling: Filling) -> None:
        """Fill in the next chunk of a prompt; a prompt that is complete starts to decode.

        The prompt's last token is not filled in: it is the newest token of the first step.
        """
        request = filling.request
        with request.contain():
            if request.started is None:
                self._start(filling)
            if not filling.done:
                self._fill_chunk(filling)
            if filling.done and request.params.max_tokens > 0:
                newest, controls = request.prompt[-1], request.controls
                self.programs.begin(filling.slot, filling.end, newest, controls)
                self.scheduler.begin(filling)
            elif filling.done:  # the request asks for its prompt's log-probabilities alone
                request.end("length")

    def _fill_chunk(self, filling: Filling) -> None:
        request, slot, at = filling.request, filling.slot, filling.at
        chunk = self._chunk_beside if self.scheduler.running else self._chunk
        end = min(at + chunk, filling.end)
        if self.prefix_cache is not None:
            end = self.prefix_cache.end_of_chunk(filling, end)
        tokens = self._cut_chunk(request.prompt, at, end)
        if (count := request.params.prompt_logprobs) is None:
            with running_program():
                self.programs.prefill(slot, at, tokens)
        else:
            following = request.prompt[at + 1 : end + 1]
            ids = np.array(following, np.int64)
            with running_program():
                scores = cast(Scoring, self.programs).score(slot, at, tokens, ids)
            if not np.isfinite(scores.logprobs).all():
                raise _make_not_finite_error("in the prompt")
            request.prompt_logprobs += _list_alternatives(following, scores, np.s_[:], count)
        self._tokens_now += end - at
        filling.at = end
        if self.prefix_cache is not None:
            with _log_failed_save():
                self.prefix_cache.save_chunk(filling)

    def _cut_chunk(self, prompt: list[int], start: int, end: int) -> Ints:
        """Return a chunk and its lookahead tokens, padded with 0 after the prompt's end."""
        ahead = self.programs.lookahead
        tokens = prompt[start : end + ahead]
        return np.array(tokens + [0] * (end - start + ahead - len(tokens)), np.int64)

    def _start(self, filling: Filling) -> None:
        """Start a request that got a slot; load the cached rows of its prompt."""
        filling.request.start()
        self.num_requests += 1
        self.prompt_tokens += len(filling.request.prompt)
        if self.prefix_cache is not None:
            self.prefix_cache.load(filling)

    def _close_gaps(self) -> None:
        moved = list[Request]()
        for source, target, request in self.scheduler.close_gaps():
            with request.contain():
                self.programs.move(source, target)
            moved.append(request)
        if any(request.ended for request in moved):  # a failed move frees a slot
            self.release()
            self._close_gaps()


@contextlib.contextmanager
def _log_failed_save() -> Iterator[None]:
    """Log an exception of a block that saves rows; its request does not fail."""
    try:
        yield
    except (RankError, StepError):
        raise
    except Exception:
        log.exception("the rows of a prompt could not be saved")


def _make_not_finite_error(where: str) -> NotFiniteError:
    return NotFiniteError(
        f"the model's logits {where} are NaN or infinite: the weights are damaged, or their "
        "numbers are beyond the engine's type; other requests go on"
    )


def _list_alternatives(
    tokens: list[int], scores: Scores | StepOutput, row: Any, count: int
) -> list[TokenLogprobs]:
    """Return tokens with their log-probabilities and the `count` likeliest tokens.

    row: index of the tokens' entries in the arrays of a step or of a prompt's scores.
    """
    assert scores.top_ids is not None, "only the mixed program has alternatives"
    assert scores.top_logprobs is not None
    tops = scores.top_ids[row][:, :count], scores.top_logprobs[row][:, :count]
    ranks = scores.ranks if isinstance(scores, Scores) else np.zeros(len(tokens), np.int64)
    arrays = (scores.logprobs[row], *tops, ranks)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)), rank)
        for token, logprob, ids, values, rank in zip(
            tokens, *(array.tolist() for array in arrays), strict=True
        )
    ]
