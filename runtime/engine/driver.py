"""The driver: threads that wait for tokens step the loop, one at a time."""

import contextlib
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias, cast

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.programs import Shared
from mtpbuild.runtime.engine.loop import Loop
from mtpbuild.runtime.errors import EngineError, make_step_error, take_first_line
from mtpbuild.runtime.requests.request import Request

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop  # slow to import, and few programs use it

log = logging.getLogger("mtpbuild")
Announce: TypeAlias = Callable[[], object]
FORKED = "this engine was loaded before os.fork(): load it in the process that uses it"


class Driver:
    """A loop that many threads share.

    There is no worker thread: a thread that waits for tokens steps the loop for all requests, while
    the other waiting threads sleep until their tokens are there. A single user thus pays for no
    hand-over between threads, an unread stream cannot block another stream, and closing joins no
    thread. Only asyncio, whose thread must not block, gets a stepping thread, at its first request.

    Ctrl-C may raise between any two lines of this code. The next `step_until` or `close` in the
    interrupted thread releases its lock and its turn.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._turn = threading.Condition()  # guards the fields below; notified after each step
        self._stepper: int | None = None  # id of the thread that steps
        self._closed = self._ended = False
        self._awaited: set[Request] = set()  # requests of asyncio
        self._news = defaultdict["AbstractEventLoop", list[Announce]](list)  # for asyncio
        self._holds = 0  # blocks of `hold` that run
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._failure: str | None = None  # why asyncio's thread has ended

    @property
    def failure(self) -> str | None:
        """The driver's reason why the engine cannot continue; None if it has none."""
        return FORKED if os.getpid() != self._process else self._failure

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, request: Request, *, for_asyncio: bool = False) -> None:
        """Queue a request; raise EngineError after `close` or if the engine cannot continue."""
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
            if self._stepper is None:  # perhaps no thread will step again
                self._loop.scheduler.end_cancelled()
                self._tell_asyncio()

    def drop(self, request: Request) -> None:
        """Ask the next step to end a request; the garbage collector may call this at any line."""
        self._loop.scheduler.cancel(request)

    def announce(self, loop: "AbstractEventLoop", call: Announce) -> None:
        """Let an event loop make a call once the step has ended, together with its other calls.

        Waking its thread takes a system call, and often the interpreter's lock.
        """
        self._news[loop].append(call)

    def call_between_steps(self, act: Callable[[], None]) -> None:
        """Call `act` while no thread steps the loop, unless it is closed."""
        self._check()
        with self._turn:
            self._turn.wait_for(lambda: self._stepper is None)
            if not self._closed:
                act()
                self._tell_asyncio()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Let `finish` wait for the end of the block, which prepares requests."""
        if os.getpid() != self._process:
            raise EngineError(FORKED)
        with self._turn:
            self._holds += 1
        try:
            yield
        finally:
            with self._turn:
                self._holds -= 1
                self._turn.notify_all()

    def finish(self) -> None:
        """Step until all requests have ended, then close; nobody adds requests any more."""
        with self._turn:
            self._turn.wait_for(lambda: self._holds == 0)
        self.step_until(lambda: self._stepper is None and self._loop.scheduler.idle)
        self.close()

    def step_until(self, done: Callable[[], bool]) -> None:
        """Step the loop, or sleep while another thread does, until `done()`.

        A failed step ends all requests with an EngineError; the engine can continue after it.
        """
        if done():
            return
        self._check()
        self._repair()
        while not done():
            try:
                if not self._take_turn(done):
                    return
                self._loop.step()
            except BaseException as error:  # Ctrl-C too, as it leaves the step incomplete
                if self._stepper == threading.get_ident():
                    self._loop.fail(make_step_error(error))
                if not isinstance(error, Exception):
                    raise
            finally:
                self._end_turn()

    def close(self) -> None:
        """End all requests, whose waiters get an EngineError, and drop the programs."""
        if os.getpid() != self._process:
            return
        self._repair()
        with self._turn:
            if self._ended:
                return
            self._closed = True  # no thread starts another step
            self._turn.wait_for(lambda: self._stepper is None)
            self._loop.close(EngineError("the engine was closed"))
            self._tell_asyncio()
            if Feature.SHARE in self._loop.programs.features:
                cast(Shared, self._loop.programs).close()
            self._ended = True
            del self._loop.programs
            self._turn.notify_all()

    def _check(self) -> None:
        """Raise EngineError if the engine cannot continue."""
        if self.failure is not None:
            raise EngineError(self.failure)

    def _take_turn(self, done: Callable[[], bool]) -> bool:
        """Wait until this thread may step; return False if `done()` comes first."""
        with self._turn:
            self._turn.wait_for(lambda: done() or (self._stepper is None and not self._closed))
            if done():
                return False
            self._stepper = threading.get_ident()
            return True

    def _end_turn(self) -> None:
        if self._stepper != threading.get_ident():
            return
        self._tell_asyncio()  # without the lock, which asyncio's thread may want at once
        with self._turn:
            self._stepper = None
            self._turn.notify_all()

    def _tell_asyncio(self) -> None:
        """Make the announced calls, each event loop's in one."""
        for loop, calls in self._news.items():
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_call_each, calls)
        self._news.clear()

    def _repair(self) -> None:
        """Release the lock and the turn that an interrupt of this thread left taken."""
        with contextlib.suppress(RuntimeError):  # raised once this thread does not hold the lock
            while True:
                self._turn.release()
        self._end_turn()

    def _drive(self) -> None:
        """Step for asyncio until `close`; if this thread ends earlier, the engine has failed."""

        def idle() -> bool:
            ended = all(request.ended for request in self._awaited)
            return ended and (self._closed or not self._loop.idle_work)

        try:
            while not self._closed:
                self.step_until(idle)
                self.call_between_steps(self._loop.release)
                with self._turn:
                    self._awaited = {request for request in self._awaited if not request.ended}
                    self._turn.wait_for(lambda: self._closed or not idle())
        except BaseException as error:
            log.critical("the thread that steps has ended", exc_info=error)
            with self._turn:
                self._failure = f"the thread that steps has ended: {take_first_line(error)}"
                self._turn.wait_for(lambda: self._stepper is None)
                self._loop.fail(EngineError(self._failure))
                self._tell_asyncio()
                self._turn.notify_all()


def _call_each(calls: list[Announce]) -> None:
    for call in calls:
        call()
