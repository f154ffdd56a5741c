"""Engines that are loaded at their first request, and given back when nobody uses them."""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from math import prod

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import host_type
from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.errors import EngineError, MtpbuildError
from mtpbuild.runtime.prefix_cache.cache import choose_default_limit
from mtpbuild.runtime.requests.totals import MeteredModel, RequestTotals
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.service import Service
from mtpbuild.runtime.threads import start_daemon

log = logging.getLogger("mtpbuild")
WAIT = 60.0  # seconds for running requests of other engines, if memory does not hold another engine
COLLECTIONS = 3  # of garbage after an engine was given back, one a second


class EngineMemory:
    """The memory that engines share, of which one at a time is loaded or given back."""

    def __init__(self, limit: int | None) -> None:
        """limit: bytes; None: unknown, all engines may be loaded at once."""
        self.limit = limit
        self.services: list[OnDemandService] = []
        self.turn = asyncio.Lock()
        self.crowded = False  # whether an engine waits until another one is idle

    def describe(self) -> str:
        """Say in a line what the engines take, with their caches and prefix caches."""
        sizes = ", ".join(f"{s.model} {s.size / 1e9:,.1f} GB" for s in self.services)
        if self.limit is None:
            return f"engines with prefix caches: {sizes}"
        fits = sum(service.size for service in self.services) <= self.limit
        rule = "all fit" if fits else "idle ones make room for others"
        return f"engines with prefix caches: {sizes}; memory: {self.limit / 1e9:,.1f} GB, {rule}"

    async def make_room(self, wanted: "OnDemandService") -> None:
        """Give back idle engines, the longest idle first, until there is room for another one.

        Running requests are waited for, and later ones of any engine wait until there is room.
        Raises ApiError if that takes too long; ends early if nobody wants the engine any more.
        """
        deadline = time.monotonic() + WAIT
        while wanted.users and (loaded := [s for s in self.services if s.is_loaded]):
            size = sum(service.size for service in loaded) + wanted.size
            if self.limit is None or size <= self.limit:
                return
            if idle := [service for service in loaded if not service.users]:
                await min(idle, key=lambda service: service.last_use).unload()
            elif time.monotonic() > deadline:
                names = " and ".join(service.model for service in loaded)
                cause = f"no memory for {wanted.model} while {names} is in use"
                raise ApiError(503, f"{cause}: {size / 1e9:,.1f} of {self.limit / 1e9:,.1f} GB")
            else:
                self.crowded = True
                await asyncio.sleep(0.05)


class OnDemandService(Service):
    """The service of an engine that is loaded at its first request and given back when idle.

    An engine that fails is given back, too: the next request loads it again.
    """

    def __init__(
        self,
        settings: ServerOptions,
        load_engine: Callable[[], Engine],
        manifest: Manifest,
        memory: EngineMemory,
        keep: float,
    ) -> None:
        """keep: seconds that an idle engine stays loaded."""
        super().__init__(settings, load_engine)
        self._manifest = manifest
        self.memory = memory
        self._keep = keep
        states = (prod(s.shape) * host_type(s.dtype).itemsize for s in manifest.state)
        self.size = sum(file.size for file in manifest.files.values()) + sum(states)
        if Feature.PREFIX_CACHE in manifest.features and not settings.no_prefix_cache:
            limit = settings.prefix_cache_bytes
            self.size += choose_default_limit(manifest) if limit is None else limit
        self.users = 0  # blocks that `loaded` runs
        self.last_use = 0.0
        self._loading: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        # Objects of a closed engine refer to each other, and its thread takes a while to end: so
        # many times the garbage collector looks for them.
        self._garbage = 0
        self._totals: RequestTotals | None = None  # of engines that were given back
        memory.services.append(self)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def metered(self) -> MeteredModel | None:
        if self.is_loaded or (totals := self._totals) is None:
            return super().metered
        return MeteredModel(self.model, self.manifest.build, None, totals.past, totals)

    @property
    def ready(self) -> bool:
        return not self.draining

    async def load(self) -> None:
        """Do nothing: the first request loads the engine."""

    @contextlib.asynccontextmanager
    async def loaded(self) -> AsyncIterator[None]:
        with contextlib.ExitStack() as stack:
            async with self.limit_time():
                if self.is_loaded and self.memory.crowded:
                    async with self.memory.turn:  # who waits for room came first
                        pass
                stack.enter_context(self._count_user())
                while self._engine is None:
                    if self._loading is None or self._loading.done():
                        self._loading = asyncio.create_task(self._load())
                    await asyncio.shield(self._loading)  # others may wait for it, too
            yield

    @contextlib.contextmanager
    def _count_user(self) -> Iterator[None]:
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            self.last_use = time.monotonic()

    async def look_after(self) -> None:
        if self._garbage:
            self._garbage -= 1
            await asyncio.to_thread(gc.collect)
        if self._engine is not None and (reason := self._engine.failure):
            self.fail(EngineError(reason))
        if self._is_idle():
            async with self.memory.turn:
                if self._is_idle():
                    await self.unload()

    async def unload(self) -> None:
        """Close the engine; only within the memory's turn, and while nobody uses it."""
        log.info("gave back %s", self.model)
        await asyncio.to_thread(self._take_engine().close)
        await asyncio.to_thread(gc.collect)

    def fail(self, error: EngineError) -> None:
        """Give the failed engine back."""
        log.warning("%s has failed, the next request loads it again: %s", self.model, error)
        self._closing = asyncio.create_task(self._close(self._take_engine()))

    async def _close(self, engine: Engine) -> None:
        async with self.memory.turn:
            await asyncio.to_thread(engine.close)

    async def _load(self) -> None:
        """Load the engine in a thread; raises ApiError."""
        assert self._load_engine is not None
        async with self.memory.turn:
            try:
                await self.memory.make_room(self)
            finally:
                self.memory.crowded = False
            if not self.users:
                return
            try:
                engine = await asyncio.wrap_future(start_daemon(self._load_engine))
            except MtpbuildError as error:
                log.warning("%s can't be loaded: %s", self.model, error)
                raise ApiError(500, f"{self.model} can't be loaded: {error}", retry=False) from None
            engine.totals = self._totals or engine.totals
            self._engine = engine

    def _is_idle(self) -> bool:
        idle = time.monotonic() - self.last_use
        return self.is_loaded and not self.users and idle >= self._keep

    def _take_engine(self) -> Engine:
        engine = self.engine
        self._engine = None
        self._garbage = COLLECTIONS
        engine.retire()
        self._totals = engine.totals
        return engine
