"""The driver lets whoever waits for tokens step the loop, one thread at a time."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Self, cast

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.programs import Shared
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.loop import Loop, step_failure
from mtpbuild.runtime.request import Chunk, Request, Result, first_line

log = logging.getLogger("mtpbuild")
FORKED = "this engine was loaded before os.fork(): load it in the process that uses it"


class Driver:
    """A loop that many threads share.

    There is no worker thread: whoever waits for tokens steps the loop for all requests, and the
    others who wait sleep until their tokens are there. So a single user pays for no hand-over
    between threads, a stream that nobody reads can't block another one, and closing joins nobody.
    Only asyncio, whose thread must not block, gets a thread that steps (from its first request on).

    Ctrl-C may raise between any two lines of ours. What it left locked or undone, the thread in
    which it came mends when it calls `step_until` or `close` again.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._turn = threading.Condition()  # guards the fields below; notified after each step
        self._stepper: int | None = None  # the thread that steps
        self._closed = self._ended = False
        self._awaited: set[Request] = set()  # asyncio's requests
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._failure: str | None = None  # why asyncio's thread is gone

    @property
    def failure(self) -> str | None:
        """Why nothing can be asked of the engine any more, as far as the driver knows."""
        return FORKED if os.getpid() != self._process else self._failure

    def submit(self, request: Request, *, for_asyncio: bool = False) -> None:
        """Queue a request; raises EngineError after `close`, or if the engine can't go on."""
        self._check()
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
        self.drop(request)
        if os.getpid() != self._process:
            return
        with self._turn:
            self._awaited.discard(request)
            if self._stepper is None:  # nor need anybody ever step again
                self._loop.scheduler.end_cancelled()

    def drop(self, request: Request) -> None:
        """Let the next step end a request; the garbage collector may call this at any line."""
        self._loop.scheduler.cancel(request)

    def between_steps(self, act: Callable[[], None]) -> None:
        """Call `act` while no thread steps the loop, unless it is closed."""
        self._check()
        with self._turn:
            self._turn.wait_for(lambda: self._stepper is None)
            if not self._closed:
                act()

    def step_until(self, done: Callable[[], bool]) -> None:
        """Step the loop, or sleep while another thread does, until `done()`.

        A step that fails ends all requests with an EngineError; the engine can go on after it.
        """
        if done():
            return
        self._check()
        self._mend()
        while not done():
            try:
                if not self._take_turn(done):
                    return
                self._loop.step()
            except BaseException as error:  # Ctrl-C too: what it interrupted is half done
                if self._stepper == threading.get_ident():
                    self._loop.fail(step_failure(error))
                if not isinstance(error, Exception):
                    raise
            finally:
                self._end_turn()

    def close(self) -> None:
        """End all requests: who waits for one gets an EngineError. Let go of the programs."""
        if os.getpid() != self._process:
            return
        self._mend()
        with self._turn:
            if self._ended:
                return
            self._closed = True  # nobody starts another step
            self._turn.wait_for(lambda: self._stepper is None)
            self._loop.close(EngineError("the engine was closed"))
            if Feature.SHARE in self._loop.programs.features:
                cast(Shared, self._loop.programs).close()
            self._ended = True
            del self._loop.programs
            self._turn.notify_all()

    def _check(self) -> None:
        """Raise EngineError if nothing can be asked of the engine any more."""
        if self.failure is not None:
            raise EngineError(self.failure)

    def _take_turn(self, done: Callable[[], bool]) -> bool:
        """Wait until this thread may step; False if there is no need."""
        with self._turn:
            self._turn.wait_for(lambda: done() or (self._stepper is None and not self._closed))
            if done():
                return False
            self._stepper = threading.get_ident()
            return True

    def _end_turn(self) -> None:
        with self._turn:
            if self._stepper == threading.get_ident():
                self._stepper = None
                self._turn.notify_all()

    def _mend(self) -> None:
        """Give back what an interrupt of this thread has left taken."""
        with contextlib.suppress(RuntimeError):  # it is not ours, or not any more
            while True:
                self._turn.release()
        self._end_turn()

    def _drive(self) -> None:
        """Body of asyncio's thread: if it ends before the engine is closed, the engine failed."""

        def idle() -> bool:
            return all(request.ended for request in self._awaited)

        try:
            while not self._closed:
                self.step_until(idle)
                self.between_steps(self._loop.release)
                with self._turn:
                    self._turn.wait_for(lambda: self._closed or not idle())
        except BaseException as error:
            log.critical("the thread that steps has ended", exc_info=error)
            with self._turn:
                self._failure = f"the thread that steps has ended: {first_line(error)}"
                self._turn.wait_for(lambda: self._stepper is None)
                self._loop.fail(EngineError(self._failure))
                self._turn.notify_all()


class Stream(Iterator[Chunk]):
    """A request in flight: iterate for its chunks, `cancel` it from any thread.

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
            self._driver.drop(self._request)
