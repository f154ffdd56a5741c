"""What raises while the host serves one request ends that request alone.

docs/architecture.md has the table of places; here an exception is planted at each of them.
"""

import asyncio
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest

from mtpbuild.runtime import Engine, EngineError, SamplingParams, Stream
from mtpbuild.runtime.contract.programs import Constraint
from mtpbuild.runtime.engine import driver as driver_module
from mtpbuild.runtime.engine import loop as loop_module
from mtpbuild.runtime.errors import NotFiniteError, RequestFailedError, StepError
from mtpbuild.runtime.requests.request import Request
from tests.support.fakes import FakePrograms, continuation, fake_engine
from tests.support.live_server import until

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
VICTIM = [9, 8, 7, 6, 5, 4, 3]
TWENTY = SamplingParams(max_tokens=20, ignore_eos=True)


# What the exception at a place says, if it is not `raise_once`'s.
PLANTED = {
    "constrain": "no row of the mask",
    "follow": "index out of bounds",
    "hand out": "no space left on device",
    "end": "no space left on device",
}


class Panic(BaseException):
    """What Rust's libraries raise: no Exception."""


class Observer:
    """Watches a request, and raises at `step` or at `end`."""

    def __init__(self, at: str) -> None:
        self.at = at

    def step(self, *given: object) -> None:
        if self.at == "step":
            raise OSError("no space left on device")

    def end(self, *given: object) -> None:
        if self.at == "end":
            raise OSError("no space left on device")


class Grammar:
    """Allows everything, and raises at the place `at`."""

    def __init__(self, at: str) -> None:
        self.at, self.kept = at, 99

    def make_next_constraint(self, drafts: list[int]) -> Constraint:
        if self.at == "constrain":
            raise Panic(PLANTED["constrain"])
        return Constraint(drafts, len(drafts), np.empty((0, 0), np.int32))

    def take(self, token: int) -> None:
        if self.at == "follow":
            raise Panic(PLANTED["follow"])


def make_engine(slots: int = 3) -> tuple[Engine, FakePrograms]:
    return fake_engine(limit=1 << 20, max_batch=slots, max_seq_len=600, width=1)


async def ask(engine: Engine) -> list[int]:
    return [t async for c in engine.astream(VICTIM, TWENTY) for t in c.token_ids]


NO_MEMORY = MemoryError("unable to allocate 1.2 GiB\nfor an array")


def raise_once(
    owner: Any, name: str, count: int = 0, error: Exception = NO_MEMORY
) -> Callable[[], None]:
    """Let call number `count` of a method raise, from now on; return what undoes it."""
    real, calls = getattr(owner, name), itertools.count()

    def planted(*given: Any, **named: Any) -> Any:
        if next(calls) == count:
            raise error
        return real(*given, **named)

    setattr(owner, name, planted)
    return lambda: setattr(owner, name, real)


def plant(place: str, engine: Engine, programs: FakePrograms, request: Request) -> Any:
    """Plant an exception at a place of a request's life, which has just been queued."""
    loop = engine._loaded.loop
    match place:
        case "begin":
            return raise_once(programs, "begin")
        case "start":
            return raise_once(request, "start")
        case "find":
            assert loop.prefix_cache is not None
            return raise_once(loop.prefix_cache.tree, "find")
        case "load":
            return raise_once(programs, "load_rows")
        case "fill":
            return raise_once(loop, "_cut_chunk")
        case "constrain" | "follow":
            request.grammar = cast(Any, Grammar(place))
        case "hand out":
            request.observer = Observer("step")
        case "score":
            return raise_once(loop_module, "_list_alternatives")
        case "detokenise":
            return raise_once(request._text, "push", 3)
        case "end":
            request.observer = Observer("end")
        case _:
            raise AssertionError(f"no such place: {place}")
    return lambda: None


ENDS_REQUEST = (
    *("start", "find", "load", "begin", "fill", "constrain"),
    *("hand out", "score", "detokenise", "follow", "end"),
)


def table() -> Iterator[list[str]]:
    """Yield the cells of the table of places."""
    text = ARCHITECTURE.read_text(encoding="utf-8").partition("## What a failure ends")[2]
    for line in text.partition("\n## ")[0].splitlines():
        if line.startswith("| ") and not line.startswith("| place"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_lists_these_places() -> None:
    ends = {cells[0]: cells[2] for cells in table()}
    assert {place for place, what in ends.items() if what == "the request"} == {
        *(*ENDS_REQUEST, "move", "parse", "serialise")
    }
    assert {place for place, what in ends.items() if what == "nothing but the rows"} == {"store"}
    assert {place for place, what in ends.items() if what == "all requests"} == {"run"}


@pytest.mark.parametrize("place", ENDS_REQUEST)
def test_the_request_alone_ends(place: str) -> None:
    """Canaries before and after get their tokens, and the next request is right."""
    engine, programs = make_engine()
    with engine:
        engine.generate([*VICTIM[:-1], 20], TWENTY)  # so that there are rows to load
        before = engine.stream([10, 11, 12], SamplingParams(max_tokens=200, ignore_eos=True))
        next(before)
        settings = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1)
        victim = engine.stream(VICTIM, settings)
        after = engine.stream([13, 14], TWENTY)
        undo = plant(place, engine, programs, victim._request)
        says = PLANTED.get(place, "unable to allocate 1.2 GiB")
        with pytest.raises(RequestFailedError, match=rf"^the request failed: {says}$"):
            victim.result()
        undo()
        assert before.result().token_ids == continuation([10, 11, 12], 200)
        assert after.result().token_ids == continuation([13, 14], 20)
        for _ in range(4):
            assert engine.generate(VICTIM, TWENTY).token_ids == continuation(VICTIM, 20)
        assert engine.stats.requests_running == engine.stats.requests_waiting == 0
        assert engine.failure is None


@pytest.mark.parametrize(("call", "cached"), [(0, len(VICTIM) + 19), (1, 0)])
def test_storing_costs_the_rows_alone(call: int, cached: int) -> None:
    """At the prompt's chunk, after which all is saved at the end, or at the end."""
    engine, programs = make_engine()
    with engine:
        undo = raise_once(programs, "save_rows", call)
        answer = engine.generate(VICTIM, TWENTY).token_ids
        assert answer == continuation(VICTIM, 20)
        assert engine.generate([5, 6], TWENTY).token_ids == continuation([5, 6], 20)
        undo()
        longer = [*VICTIM, *answer, 5]
        result = engine.generate(longer, TWENTY)
        assert result.token_ids == continuation(longer, 20)
        assert result.metrics.cached_tokens == cached


def test_a_program_that_fails_while_rows_are_stored_ends_all() -> None:
    """As a slot's drafter does, which is filled before its rows are saved."""
    engine, programs = make_engine()
    with engine:
        undo = raise_once(programs, "save_rows", error=StepError("a step failed: no memory"))
        streams = [engine.stream([n, n + 1, n + 2, n + 3], TWENTY) for n in (20, 30)]
        for stream in streams:
            with pytest.raises(StepError, match=r"^a step failed: no memory$"):
                stream.result()
        undo()
        assert engine.generate(VICTIM, TWENTY).token_ids == continuation(VICTIM, 20)


def test_a_slot_that_can_not_be_cleared_is_no_failed_save(caplog: pytest.LogCaptureFixture) -> None:
    engine, programs = make_engine()
    with engine:
        engine.generate(VICTIM, TWENTY)
        programs.damage = 299
        undo = raise_once(programs, "clear")
        for error in (NotFiniteError, StepError):
            with pytest.raises(error):
                engine.generate([*VICTIM, 299, 5], TWENTY)
        undo()
        assert engine.generate(VICTIM, TWENTY).metrics.cached_tokens == 0
    assert "saved" not in caplog.text


def test_a_move_that_fails_ends_the_request_that_moves() -> None:
    engine, programs = make_engine()
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    with engine:
        short, first, second = (engine.stream([n, n + 1], long) for n in (20, 30, 40))
        next(second)
        undo = raise_once(programs, "move")
        short.cancel()
        with pytest.raises(RequestFailedError):
            second.result()
        undo()
        assert first.result().token_ids == continuation([30, 31], 200)
        assert engine.generate(VICTIM, TWENTY).token_ids == continuation(VICTIM, 20)


@pytest.mark.parametrize("run", ["prefill", "step"])
def test_a_run_that_fails_ends_all(run: str) -> None:
    engine, programs = make_engine()
    with engine:
        streams = [engine.stream([n, n + 1, n + 2], TWENTY) for n in (20, 30)]
        undo = raise_once(programs, run)
        for stream in streams:
            with pytest.raises(StepError, match=r"^a step failed: unable to allocate 1\.2 GiB$"):
                stream.result()
        undo()
        assert engine.generate(VICTIM, TWENTY).token_ids == continuation(VICTIM, 20)


def test_asyncio_goes_on_after_rows_that_could_not_be_stored() -> None:
    engine, programs = make_engine()

    async def main() -> None:
        undo = raise_once(programs, "save_rows")
        assert await ask(engine) == continuation(VICTIM, 20)
        assert await asyncio.wait_for(ask(engine), 10) == continuation(VICTIM, 20)
        undo()

    with engine:
        asyncio.run(main())
        assert engine.failure is None


def test_a_dead_thread_is_known() -> None:
    """Nobody waits for ever: whoever runs or asks gets an error, and the engine says so."""
    engine, _ = make_engine()

    async def main() -> None:
        await ask(engine)
        engine._loaded.driver.call_between_steps = raise_always  # type: ignore[method-assign]
        with contextlib.suppress(EngineError):  # the thread ends before this request or after it
            await asyncio.wait_for(ask(engine), 10)
        until(lambda: engine.failure)
        for _ in range(2):
            with pytest.raises(EngineError, match="the thread that steps has ended: lost"):
                await asyncio.wait_for(ask(engine), 10)

    def raise_always(act: Callable[[], None]) -> None:
        raise RuntimeError("lost")

    with engine:
        asyncio.run(main())
        assert "the thread that steps has ended: lost" in str(engine.failure)
        with pytest.raises(EngineError, match="the thread that steps has ended"):
            engine.generate(VICTIM)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks in a process with threads
def test_a_forked_process_is_told() -> None:
    engine, _ = make_engine()

    with engine:
        asyncio.run(ask(engine))
        running = engine.stream(VICTIM, TWENTY)
        next(running)
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            output = list[str]()
            for call in (
                lambda: asyncio.run(ask(engine)),
                lambda: engine.generate(VICTIM),
                running.result,
            ):
                try:
                    call()
                except EngineError as error:
                    output.append(str(error))
            engine.close()
            output.append(str(engine.failure))
            os.write(writing, "\n".join(output).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            output = pipe.read().splitlines()
        os.waitpid(child, 0)
        assert output == [driver_module.FORKED] * 4
        assert running.result().token_ids == continuation(VICTIM, 20)


def test_the_collector_ends_no_request_at_once() -> None:
    """A stream that is dropped in the middle of `release` is ended by the next step."""
    engine, programs = make_engine()
    prompt = [5 + n % 50 for n in range(300)]
    with engine:
        stream: list[Stream] = [engine.stream(prompt, TWENTY)]
        engine._loaded.loop.step()  # a chunk of the prompt is there
        ended = engine.stream([20, 21], TWENTY)
        engine._loaded.loop.scheduler.waiting.remove(ended._request)
        engine._loaded.loop.scheduler.slots[1] = ended._request
        ended._request.end("length")
        save = programs.save_rows

        def collect(*given: Any) -> None:
            stream.clear()
            save(*given)

        programs.save_rows = collect  # type: ignore[method-assign,assignment]
        engine._loaded.driver.call_between_steps(engine._loaded.loop.release)
        programs.save_rows = save  # type: ignore[method-assign]
        result = engine.generate(prompt, TWENTY)
        assert result.token_ids == continuation(prompt, 20)
        assert result.metrics.cached_tokens <= 4


class Interrupt:
    """A Ctrl-C at line number `at` of the driver and the loop, counted from when it is set."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, value: object) -> "Interrupt | None":
        files = (driver_module.__file__, loop_module.__file__)
        collector = frame.f_code.co_name in ("__del__", "drop")  # Python drops what these raise
        if collector or frame.f_code.co_filename not in files:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self


def wait(stream: Stream, told: list[BaseException]) -> None:
    try:
        stream.result()
    except EngineError as error:
        told.append(error)


def test_an_interrupt_at_any_line_leaves_an_engine_that_closes() -> None:
    """Another thread that waits is told, too."""
    for at in itertools.count(1):
        engine, _ = make_engine(2)
        other = engine.stream([20, 21, 22], SamplingParams(max_tokens=500, ignore_eos=True))
        interrupt, told = Interrupt(at), list[BaseException]()
        stream = engine.stream(VICTIM, SamplingParams(max_tokens=6))
        sys.settrace(interrupt)
        interrupted = False
        try:
            stream.result()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)

        waiting = threading.Thread(target=wait, args=(other, told))
        closing = threading.Timer(10, os._exit, [77])  # a hang would be for ever
        closing.start()
        engine.close()
        waiting.start()
        waiting.join(10)
        closing.cancel()
        assert not waiting.is_alive()
        assert len(told) == 1
        assert interrupted == (interrupt.lines >= at)
        if not interrupted:
            break
    assert at > 60, "lines were interrupted"
