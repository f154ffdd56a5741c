"""The engine behind the server: it admits requests, counts them, and notices failures."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field

from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.errors import (
    EngineError,
    NotFiniteError,
    RankError,
    RequestError,
    RequestFailedError,
    StepError,
)
from mtpbuild.runtime.request import Chunk, Request
from mtpbuild.runtime.sampling import SamplingParams
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.metrics import Metrics
from mtpbuild.runtime.server.pool import Pool

log = logging.getLogger("mtpbuild")
SHUTTING_DOWN = "the server is shutting down"
READERS, COMPILERS = 4, 2  # threads
FORMS = 32  # forms that are compiled or wait for it
READ_BUSY = "too many long bodies are being read already (--max-queue)"
COMPILE_BUSY = f"{FORMS} forms of answers are being compiled already"
CUT = 0.5  # seconds in which clients may read that their requests were cut off


@dataclass(frozen=True)
class Settings:
    """Holds the flags of `mtpbuild serve` that concern requests."""

    model: str | None = None  # its name to clients; None: the engine's
    api_key: str | None = None
    max_queue: int = 256
    request_timeout: float | None = None
    max_body: int = 8 * 1024 * 1024
    header_timeout: float = 30.0  # seconds, as are those below
    body_timeout: float = 60.0
    send_timeout: float = 60.0
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # names that requests may give the server; "*": any
    thinking: bool = True  # thoughts are a field of their own
    tool_parser: str | None = None  # None: the chat template decides; "none": calls stay text
    log_requests: bool = False
    access_log: bool = False  # a line for each request: who asked, method, path and status
    defaults: dict[str, float | int] = field(default_factory=dict)  # of generation_config.json


class Service:
    """Admits requests to an engine while it works.

    It is ready from when the engine is loaded until it drains or the engine fails.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine: Engine | None = None
        self.draining = False
        self.failed: EngineError | None = None  # why the engine can't go on
        self.on_failure: Callable[[], None] = lambda: None
        self.open = 0  # choices that were let in and have not been answered
        self.reading = Pool("reading", READERS, settings.max_queue + READERS, READ_BUSY)
        self.compiling = Pool("compiling", COMPILERS, FORMS, COMPILE_BUSY)
        self._limits: set[asyncio.Timeout] = set()  # of the chunks that are waited for
        self._cut = False  # requests are over, however far they have come
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, engine: Engine) -> None:
        """Take the engine, now that it is loaded."""
        self.model = self.settings.model or engine.manifest.model.name
        self.metrics = Metrics(self.model, engine.manifest.build, lambda: engine.stats)
        self.engine = engine

    @property
    def ready(self) -> bool:
        return self.engine is not None and not self.draining and self.failed is None

    def admit(self, count: int) -> Engine:
        """Give the engine for so many more requests; raises ApiError if it takes none now."""
        if self.engine is None:
            raise ApiError(503, "the engine is being loaded")
        if self.failed is not None:
            raise ApiError(503, f"the engine has failed: {self.failed}")
        if self.draining:
            raise ApiError(503, SHUTTING_DOWN)
        slots = self.engine.manifest.build.slots
        if count > (most := slots + self.settings.max_queue):
            much = f"the request has {count} choices, {most} may run and wait (--max-queue)"
            raise ApiError(429, much, retry=False)
        if self.open + count > most:
            waiting = max(0, self.open - slots)
            raise ApiError(429, f"{waiting} requests wait already (--max-queue)")
        return self.engine

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request is for another model."""
        if name not in (None, self.model):
            raise ApiError(404, f"The model `{name}` does not exist.", "model")

    @contextlib.contextmanager
    def admitted(self, count: int) -> Iterator[Engine]:
        """Count so many choices as open while the block runs; raises ApiError as `admit` does."""
        engine = self.admit(count)
        self.open += count
        try:
            yield engine
        finally:
            self.open -= count

    async def stream(self, engine: Engine, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield a request's chunks; leaving the stream ends the request. Raises ApiError."""
        began, last = time.perf_counter(), 0.0
        reason, m = "abort", self.metrics
        try:
            async with contextlib.aclosing(engine.astream(request)) as chunks:
                while (chunk := await self._next(chunks, began)) is not None:
                    now = time.perf_counter()
                    if chunk.token_ids:
                        (m.between if last else m.first_token).observe(now - (last or began))
                        last = now
                    if chunk.metrics is not None:
                        reason = chunk.finish_reason or reason
                        m.whole.observe(now - began)
                        self._observe(chunk)
                    yield chunk
        except TimeoutError:
            if self._cut:
                raise ApiError(503, SHUTTING_DOWN) from None
            late = "the request took too long (--request-timeout)"
            raise ApiError(408, late, retry=False) from None
        except RequestError as error:
            raise ApiError(400, str(error)) from None
        except (NotFiniteError, RequestFailedError) as error:  # its own: the engine goes on
            reason = "error"
            raise ApiError(500, str(error)) from None
        except EngineError as error:
            reason = "error"
            self._probe(error)
            raise ApiError(500, f"the engine failed: {error}") from None
        finally:
            m.ended("abort" if reason == "cancelled" else reason)

    async def _next(self, chunks: AsyncGenerator[Chunk, None], began: float) -> Chunk | None:
        """Get the next chunk, or None after the last; TimeoutError once the time is over."""
        most = self.settings.request_timeout
        left = None if most is None else began + most - time.perf_counter()
        async with asyncio.timeout(0 if self._cut else left) as limit:
            self._limits.add(limit)
            try:
                return await anext(chunks, None)
            finally:
                self._limits.discard(limit)

    async def drained(self, timeout: float) -> bool:
        """Admit nobody, and wait until all requests are answered, those too late by an error.

        Returns at the latest `CUT` seconds after the time is over, and whether all are answered.
        """
        self.draining = True
        await self._answered(timeout)
        if self.open:
            log.warning("%d requests were cut off after %g s (--drain-timeout)", self.open, timeout)
            self._cut, now = True, asyncio.get_running_loop().time()
            for limit in self._limits:
                if not limit.expired():
                    limit.reschedule(now)
            await self._answered(CUT)
        return not self.open

    async def _answered(self, within: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self.open:
                    await asyncio.sleep(0.02)

    def _observe(self, chunk: Chunk) -> None:
        m, told = self.metrics, chunk.metrics
        assert told is not None
        m.prompt.observe(told.prompt_tokens)
        m.generated.observe(told.output_tokens)
        if told.queue_s is None or told.ttft_s is None:
            return
        decode = (told.tpot_s or 0) * (told.output_tokens - 1)
        m.queued.observe(told.queue_s)
        m.prefill.observe(told.ttft_s - told.queue_s)
        m.decode.observe(decode)
        m.inference.observe(told.ttft_s - told.queue_s + decode)
        if told.tpot_s is not None:
            m.per_token.observe(told.tpot_s)

    def _probe(self, failure: EngineError) -> None:
        """After a failed step, try whether the engine still works, unless a trial is running."""
        if self._tasks or self.failed is not None:
            return
        task = asyncio.get_running_loop().create_task(self._try(failure))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _try(self, failure: EngineError) -> None:
        assert self.engine is not None
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        try:
            async for _ in self.engine.astream([0], params):
                pass
        except (StepError, RankError) as error:
            self.fail(error)
        except Exception:  # the trial's own, such as no memory for it: only a step fails the engine
            log.exception("the engine could not be tried")
        else:
            log.warning("the engine goes on: %s", failure)

    async def watch(self, every: float = 1.0) -> None:
        """Check every so many seconds whether the engine has failed while it was idle."""
        assert self.engine is not None
        while self.failed is None:
            if reason := self.engine.failure:
                self.fail(EngineError(reason))
            await asyncio.sleep(every)

    def fail(self, error: EngineError) -> None:
        """Note that the engine can't go on."""
        self.failed = error
        self.on_failure()
