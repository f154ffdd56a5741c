"""The server's process: what it logs, and how it ends when it has not begun."""

import asyncio
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from mtpbuild.runtime.server.server import on_signals
from tests.support.live_server import url_of

ROOT = Path(__file__).parents[2]


def started(loading: float, step: float = 0, drain: float = 5) -> Any:
    times = map(str, (loading, step, drain))
    command = [sys.executable, "-m", "tests.support.fake_server", *times]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_a_signal_while_the_engine_is_loaded() -> None:
    with started(60) as process:
        assert process.stderr.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_requests_are_logged_if_asked_for() -> None:
    with started(0) as process:
        url = url_of(process)
        body = {"prompt": "a\nb", "max_tokens": 2, "request_id": "x\ny"}
        response = httpx2.post(f"{url}/v1/completions", json=body, timeout=20, trust_env=False)
        assert response.status_code == 200
        line = process.stderr.readline()
        assert '"id": "x\\ny"' in line, "one line, whatever it says"
        assert '"prompt": "a\\nb"' in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""


def test_requests_that_are_cut_off_hear_of_it() -> None:
    """A stream ends with an error and [DONE], others get an error, and one line is logged."""
    with started(0, step=0.02, drain=0.5) as process, ThreadPoolExecutor() as pool:
        url = url_of(process)
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}

        def ask(**more: object) -> httpx2.Response:
            asked = body | more
            return httpx2.post(f"{url}/v1/completions", json=asked, timeout=20, trust_env=False)

        asked = [pool.submit(ask, **more) for more in ({"stream": True}, {"n": 2}, {})]
        for _ in asked:
            process.stderr.readline()  # each is logged once it is let in
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, "half a second; what was asked for takes 80"
        stream, *others = (each.result() for each in asked)
        *_, error, done = [line for line in stream.text.splitlines() if line]
        assert done == "data: [DONE]"
        told = [json.loads(error.removeprefix("data: ")), *(each.json() for each in others)]
        assert [each.status_code for each in others] == [503, 503]
        assert {each["error"]["message"] for each in told} == {"the server is shutting down"}
        line = "4 requests were cut off after 0.5 s (drain_timeout)\n"
        assert process.stderr.read() == line


def test_signals_where_loops_take_no_handlers() -> None:
    """As on Windows: the call comes from the loop, which is woken up for it."""

    class Bare(asyncio.SelectorEventLoop):
        def add_signal_handler(self, *of: Any) -> None:  # type: ignore[override]
            raise NotImplementedError

    async def signalled() -> None:
        heard = asyncio.Event()
        on_signals(asyncio.get_running_loop(), heard.set)
        signal.raise_signal(signal.SIGTERM)
        assert await asyncio.wait_for(heard.wait(), 10)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with asyncio.Runner(loop_factory=Bare) as runner:
            runner.run(signalled())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
