"""The driver lets whoever waits for tokens step the loop, one thread at a time."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Self, cast

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.programs import Shared
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.loop import Loop
from mtpbuild.runtime.request import Chunk, Request, Result


class Driver:
    """Lets many threads share one loop.

    There is no worker thread: whoever waits for tokens steps the loop for all requests, and the
    others who wait sleep until their tokens are there. So a single user pays for no hand-over
    between threads, a stream that nobody reads can't block another one, and closing joins nobody.
    Only asyncio, whose thread must not block, gets a thread that steps (from its first request on).
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._turn = threading.Condition()  # guards the fields below; notified after each step
        self._stepping = False
        self._closed = False
        self._awaited: set[Request] = set()  # asyncio's requests
        self._thread: threading.Thread | None = None

    def submit(self, request: Request, *, for_asyncio: bool = False) -> None:
        """Queue a request; raises EngineError after `close`."""
        with self._turn:
            if self._closed:
                raise EngineError("the engine is closed")
            self._loop.scheduler.add(request)
            if for_asyncio:
                self._awaited.add(request)
                self._turn.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._drive, daemon=True)
                    self._thread.start()

    def cancel(self, request: Request) -> None:
        """End a request, unless it has ended; its slot is free from the next step on."""
        with self._turn:
            self._awaited.discard(request)
            self._loop.scheduler.cancel(request)
            if not self._stepping:  # nor need anybody ever step again
                self._loop.scheduler.end_cancelled()

    def between_steps(self, act: Callable[[], None]) -> None:
        """Call `act` while no thread steps the loop, unless it is closed."""
        with self._turn:
            self._turn.wait_for(lambda: not self._stepping)
            if not self._closed:
                act()

    def step_until(self, done: Callable[[], bool]) -> None:
        """Step the loop, or sleep while another thread does, until `done()`.

        A step that fails ends all requests with an EngineError; the engine can go on after it.
        """
        while True:
            with self._turn:
                self._turn.wait_for(lambda: done() or not (self._stepping or self._closed))
                if done():
                    return
                self._stepping = True
            try:
                self._loop.step()
            except BaseException as error:  # Ctrl-C too: what it interrupted is half done
                self._loop.fail(_failure(error))
                if not isinstance(error, Exception):
                    raise
            finally:
                with self._turn:
                    self._stepping = False
                    self._turn.notify_all()

    def close(self) -> None:
        """End all requests: who waits for one gets an EngineError. Let go of the programs."""
        with self._turn:
            if self._closed:
                return
            self._closed = True  # nobody starts another step
            self._turn.wait_for(lambda: not self._stepping)
            self._loop.close(EngineError("the engine was closed"))
            if Feature.SHARE in self._loop.programs.features:
                cast(Shared, self._loop.programs).close()
            del self._loop.programs
            self._turn.notify_all()

    def _drive(self) -> None:
        """Body of asyncio's thread."""

        def idle() -> bool:
            return all(request.ended for request in self._awaited)

        while not self._closed:
            self.step_until(idle)
            self.between_steps(self._loop.release)
            with self._turn:
                self._turn.wait_for(lambda: self._closed or not idle())


class Stream(Iterator[Chunk]):
    """Is a request in flight: iterate for its chunks, `cancel` it from any thread.

    Closing it, leaving its `with` block or dropping it also ends the request and frees its slot.
    """

    def __init__(self, driver: Driver, request: Request) -> None:
        self._driver, self._request = driver, request
        driver.submit(request)

    def __next__(self) -> Chunk:
        request = self._request
        if not (request.outbox or request.ended):
            self._driver.step_until(lambda: bool(request.outbox) or request.ended)
        if request.outbox:
            return request.outbox.popleft()
        if request.error:
            raise request.error
        raise StopIteration

    def result(self) -> Result:
        """Wait for the end; all that the request gave, also what was iterated over before."""
        self._driver.step_until(lambda: self._request.ended)
        if self._request.error:
            raise self._request.error
        return self._request.result()

    def cancel(self) -> None:
        """End the request, unless it has ended; its last chunk says "cancelled"."""
        self._driver.cancel(self._request)

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # at the interpreter's exit
            self.cancel()


def _failure(error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    failure = EngineError(f"a step failed: {reason}")
    failure.__cause__ = error
    return failure
