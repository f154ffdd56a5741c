"""The services between the routes and the engines: admission, metrics, failures and draining."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.engine.metrics import write_metrics
from mtpbuild.runtime.errors import (
    DeadlineError,
    EngineError,
    NotFiniteError,
    RankError,
    RequestError,
    RequestFailedError,
    StepError,
)
from mtpbuild.runtime.requests.request import Chunk, Request
from mtpbuild.runtime.requests.totals import MeteredModel
from mtpbuild.runtime.sampling.params import SamplingParams
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.threads import start_daemon

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger("mtpbuild")
SHUTTING_DOWN = "the server is shutting down"
READERS = 4  # threads
COMPILERS = 2  # threads
FORMS = 32  # grammars of answers that are compiled at once or wait for it
READ_BUSY = "too many long bodies are being read already (max_queue)"
COMPILE_BUSY = f"{FORMS} forms of answers are being compiled already"
CUT_OFF_SECONDS = 0.5  # time for clients to read the error after their requests were cut off


class Pool:
    """A few threads for jobs of one kind, with a limit on the jobs that run or wait.

    A job whose caller is cancelled before it starts is dropped. Jobs with the same key count once
    towards the limit, since the first job does the work for all and caches the result.
    """

    def __init__(self, name: str, threads: int, limit: int, busy: str) -> None:
        """busy: the error message for a client whose job exceeds the limit."""
        self._executor = ThreadPoolExecutor(threads, name)
        self._limit, self._busy = limit, busy
        self._jobs: dict[Future[Any], Hashable] = {}

    async def run(self, key: Hashable, call: Callable[P, R], *args: P.args, **kw: P.kwargs) -> R:
        """Return what the call returns; raises ApiError if the limit is reached."""
        keys = set(self._jobs.values())
        if key not in keys and len(keys) >= self._limit:
            raise ApiError(429, self._busy)
        job = self._executor.submit(call, *args, **kw)
        self._jobs[job] = key
        job.add_done_callback(lambda done: self._jobs.pop(done, None))
        return await asyncio.wrap_future(job)


class Service:
    """Admission of requests to an engine.

    The service is ready once the engine is loaded, until it drains or the engine fails.
    """

    def __init__(
        self, settings: ServerOptions, load_engine: Callable[[], Engine] | None = None
    ) -> None:
        """load_engine: what `load` calls; None if `start` is given an engine."""
        self.settings = settings
        self._load_engine = load_engine
        self._engine: Engine | None = None
        self.draining = False
        self.failed: EngineError | None = None  # why the engine can't continue
        self.on_failure: Callable[[], None] = lambda: None
        self.open = 0  # admitted choices that have not been answered
        self.reading = Pool("reading", READERS, settings.max_queue + READERS, READ_BUSY)
        self.compiling = Pool("compiling", COMPILERS, FORMS, COMPILE_BUSY)
        self._limits: set[asyncio.Timeout] = set()  # time limits of the requests that run
        self._cut_off = False  # the drain timeout has passed: unfinished requests fail
        self._trial: asyncio.Task[None] | None = None  # tries the engine after a failed step

    async def load(self) -> None:
        """Load the engine in a thread and start serving it."""
        assert self._load_engine is not None
        self.start(await asyncio.wrap_future(start_daemon(self._load_engine)))

    def start(self, engine: Engine) -> None:
        """Start serving a loaded engine; a swap does not change the model's name."""
        if not self.settings.served_model_name:
            self.settings = replace(self.settings, served_model_name=engine.manifest.model.name)
        self._engine = engine

    def close(self) -> None:
        """Close the engine, if it is loaded."""
        if self._engine is not None:
            self._engine.close()

    @property
    def metered(self) -> MeteredModel | None:
        """The model's counts; None if its engine has not been loaded yet."""
        return None if self._engine is None else self._engine.meter(self.model)

    @property
    def engine(self) -> Engine:
        """The engine; raises ApiError while it is being loaded."""
        if self._engine is None:
            raise ApiError(503, "the engine is being loaded")
        return self._engine

    @property
    def manifest(self) -> Manifest:
        return self.engine.manifest

    @property
    def model(self) -> str:
        """The model's name to clients."""
        return self.settings.served_model_name or self.manifest.model.name

    @property
    def is_loaded(self) -> bool:
        return self._engine is not None

    @property
    def ready(self) -> bool:
        alive = self._engine is not None and self._engine.alive
        return alive and not self.draining and self.failed is None

    def admit(self, count: int) -> None:
        """Raise ApiError if the engine can't take `count` more choices."""
        slots = self.manifest.build.slots
        if self.failed is not None:
            raise ApiError(503, f"the engine has failed: {self.failed}")
        if self.draining:
            raise ApiError(503, SHUTTING_DOWN)
        limit = slots + self.settings.max_queue
        if count > limit:
            message = f"the request has {count} choices, {limit} may run and wait (max_queue)"
            raise ApiError(429, message, retry=False)
        if self.open + count > limit:
            waiting = max(0, self.open - slots)
            raise ApiError(429, f"{waiting} requests wait already: try again later (max_queue)")

    @contextlib.asynccontextmanager
    async def loaded(self) -> AsyncIterator[None]:
        """Keep the engine loaded while the block runs."""
        yield

    @contextlib.contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Count `count` choices as open while the block runs; raise what `admit` raises."""
        self.admit(count)
        self.open += count
        try:
            yield
        finally:
            self.open -= count

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield a request's chunks; closing the stream aborts the request. Raises ApiError."""
        try:
            async with contextlib.aclosing(self.engine.astream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except DeadlineError as error:
            raise ApiError(408, str(error), retry=False) from None
        except RequestError as error:
            raise ApiError(400, str(error)) from None
        except (NotFiniteError, RequestFailedError) as error:  # only this request failed
            raise ApiError(500, str(error)) from None
        except EngineError as error:
            if self.failed is None and (self._trial is None or self._trial.done()):
                self._trial = asyncio.create_task(self._try_engine(error))
            raise ApiError(500, f"the engine failed: {error}") from None

    @contextlib.asynccontextmanager
    async def limit_time(self) -> AsyncIterator[None]:
        """Limit the time of the block; raises ApiError if it is over."""
        timeout = self.settings.request_timeout or None
        try:
            async with asyncio.timeout(0 if self._cut_off else timeout) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except DeadlineError:  # the request's own
            raise
        except TimeoutError:
            if self._cut_off:
                raise ApiError(503, SHUTTING_DOWN) from None
            message = "the request took too long (request_timeout)"
            raise ApiError(408, message, retry=False) from None

    async def drain(self, timeout: float) -> bool:
        """Stop admitting requests and wait until all open requests are answered.

        After `timeout` seconds the remaining requests are answered with an error. Returns whether
        all requests were answered, at most `CUT_OFF_SECONDS` later.
        """
        self.draining = True
        await self._wait_until_answered(timeout)
        if self.open:
            log.warning("%d requests were cut off after %g s (drain_timeout)", self.open, timeout)
            self._cut_off = True
            now = asyncio.get_running_loop().time()
            for limit in self._limits:
                if not limit.expired():
                    limit.reschedule(now)
            await self._wait_until_answered(CUT_OFF_SECONDS)
        return not self.open

    async def _wait_until_answered(self, within: float) -> None:
        with contextlib.suppress(TimeoutError):  # the caller asks what is open
            async with asyncio.timeout(within):
                while self.open:
                    await asyncio.sleep(0.02)

    async def _try_engine(self, failure: EngineError) -> None:
        """Test the engine with a small request."""
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        try:
            async with self.loaded():
                async for _ in self.engine.astream([0], params):
                    pass
        except (StepError, RankError) as error:
            self.fail(error)
        except Exception:  # such as out of memory: only a failed step means that the engine failed
            log.exception("the engine could not be tried")
        else:
            log.warning("the engine goes on: %s", failure)

    async def watch(self, every: float = 1.0) -> None:
        """Look after the engine every `every` seconds, until it has failed."""
        while self.failed is None:
            await self.look_after()
            await asyncio.sleep(every)

    async def look_after(self) -> None:
        """Find out whether the engine has failed while idle."""
        if reason := self.engine.failure:
            several = self.engine.manifest.build.tp > 1
            self.fail(RankError(reason) if several else EngineError(reason))

    def fail(self, error: EngineError) -> None:
        """Record that the engine has failed for good."""
        self.failed = error
        self.on_failure()


class Services:
    """The services of a server, which share all settings but their models' own."""

    def __init__(self, *services: Service) -> None:
        self.all = services
        self.settings = services[0].settings
        self.reading = services[0].reading  # reads bodies before their model is known

    def find(self, model: str | None) -> Service:
        """Return the service of a model, by default the first; raises ApiError."""
        for service in self.all:
            if model in (None, service.model):
                return service
        raise ApiError(404, f"The model `{model}` does not exist.", "model")

    def cards(self) -> list[dict[str, Any]]:
        """Describe the models, as vLLM does, with llama.cpp's status; raises ApiError."""
        return [
            {
                "id": service.model,
                "object": "model",
                "created": 0,
                "owned_by": "mtpbuild",
                "root": service.manifest.model.name,
                "parent": None,
                "max_model_len": service.manifest.build.max_seq_len,
                "status": {"value": "loaded" if service.is_loaded else "unloaded"},
            }
            for service in self.all
        ]

    def write_metrics(self) -> str:
        """Return the metrics of the models that were loaded, as Prometheus's text."""
        return write_metrics([s.metered for s in self.all if s.metered is not None])

    @property
    def open(self) -> int:
        """The number of choices that are under way or wait."""
        return sum(service.open for service in self.all)

    @property
    def ready(self) -> bool:
        return all(service.ready for service in self.all)

    @property
    def failed(self) -> EngineError | None:
        return next((s.failed for s in self.all if s.failed is not None), None)

    async def load(self) -> None:
        """Load the engines that are not loaded on demand."""
        await asyncio.gather(*(service.load() for service in self.all))

    async def watch(self) -> None:
        """Look after all engines."""
        await asyncio.gather(*(service.watch() for service in self.all))

    async def drain(self, timeout: float) -> bool:
        """Drain all services; return whether all requests were answered."""
        return all(await asyncio.gather(*(service.drain(timeout) for service in self.all)))

    def close(self) -> None:
        """Close all engines."""
        for service in self.all:
            service.close()
