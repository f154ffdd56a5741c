"""What one body may cost: values, levels, choices, threads, and the time of everybody else."""

import asyncio
import http.client
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import TypeAdapter

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.engine.loaded import Prompt
from mtpbuild.runtime.requests.request import Chunk, Request, TokenLogprobs
from mtpbuild.runtime.server.answers import AnswerChoice
from mtpbuild.runtime.server.bodies import (
    MAX_DEPTH,
    MAX_LISTS,
    MAX_VALUES,
    read_body,
    read_json,
)
from mtpbuild.runtime.server.completions import CompletionAnswer
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.protocol import CompletionBody
from mtpbuild.runtime.server.service import Pool
from mtpbuild.runtime.text.detokenizer import Span
from mtpbuild.runtime.text.tokenizer import LONG, Tokenizer
from tests.support.fakes import FakePrograms, backend_tokenizer, fake_manifest, fake_tokenizer
from tests.support.live_server import live, post, until, url_of
from tests.support.nasty_bodies import BODIES, QUICK
from tests.support.served import ASK, fails, served

ROOT = Path(__file__).parents[2]
WAIT = 1.0  # seconds that /health may take while a body is read
SLOW = 4  # times slower than that is a machine that runs other tests as well
MEMORY = 200  # MB that a body may take


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b"[-Infinity]", "-Infinity is not a finite number"),
        (b"[1e999]", "1e999 is not a finite number"),
        (b"[" + b"1" * 310 + b"]", "a number has 310 digits, 309 at most"),
        (b"[1", "the body is not JSON: Expecting ',' delimiter: line 1 column 3 (char 2)"),
        (b"", "the body is not JSON: Expecting value"),
        ('{"a": 1}'.encode("utf-16"), "it must be UTF-8"),
        (b"\xff\xff\xff\xff", "the body is not JSON"),
        (b"[" * 200 + b"]" * 200, f"nested deeper than {MAX_DEPTH} levels"),
        (b'{"a":' * 200, f"nested deeper than {MAX_DEPTH} levels"),
        (b"[" + b"0," * MAX_VALUES + b"0,0]", f"more than {MAX_VALUES} values"),
        (b"[" + b"{}," * MAX_LISTS + b"{}]", f"more than {MAX_LISTS} lists"),
    ],
)
def test_bodies_that_are_refused(raw: bytes, says: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_json(raw)
    assert refused.value.status == 400
    assert says in refused.value.message


def test_json_that_is_no_object() -> None:
    """It is JSON, so the message says what the body must be."""
    with pytest.raises(ApiError, match="the body must be an object with this route's fields"):
        read_body(b"[1]", TypeAdapter(CompletionBody))


@pytest.mark.parametrize(
    "value",
    ["[" * 200_000, '\\"[{' * 100_000, ['"' * 300, "\\", "[" * 600_000, "\ud800"],
     {"a": 10**308, "b": [1.5e300, -0.0, True, None]}, [[0]] * (MAX_LISTS - 1)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_bodies_that_are_read(value: Any) -> None:
    """Text is no structure, whatever is in it."""
    assert read_json(json.dumps(value).encode()) == value
    assert read_json(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")) == (
        value
    )


def test_choices_are_counted_before_they_are_made() -> None:
    with served(settings=ServerOptions(max_queue=10)) as (server, _), server.client() as client:
        for prompt, n, count in (([[1]] * 5000, 128, 640_000), (["a"] * 13, 1, 13), ("a", 13, 13)):
            response = client.post("/v1/completions", json=ASK | {"prompt": prompt, "n": n})
            fails(response, 429, f"the request has {count} choices, 12 may run and wait")
        assert client.post("/v1/completions", json=ASK | {"prompt": [[1]] * 12}).status_code == 200
        until(lambda: server.service.open == 0)
        assert client.post("/v1/completions", json=ASK | {"prompt": [1] * 13}).status_code == 200


def test_the_first_error_is_all_that_is_told(client: httpx2.Client) -> None:
    wrong: tuple[list[Any], ...] = ([{}] * 9000, [[1], *[["a"]] * 9000])
    for prompt in wrong:
        response = client.post("/v1/completions", json={"prompt": prompt})
        fails(response, 400, "prompt: ", "prompt")
        assert len(response.content) < 300
    messages = {"messages": [7] * 9000}
    for path, more in (("messages", {"max_tokens": 1}), ("chat/completions", {})):
        response = client.post(f"/v1/{path}", json=messages | more)
        assert response.status_code == 400
        assert "messages.0: Input should be " in response.text


def test_a_text_that_is_too_long_is_not_tokenised(client: httpx2.Client) -> None:
    told: list[int] = []

    class Counting(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            told.append(len(text))
            return super().encode(text, add_special_tokens=add_special_tokens)

    tokenizer = Counting(backend_tokenizer())
    text = "hello, what is the weather? " * 40_000
    assert tokenizer.exceeds(text, 100)
    assert not told
    tokenizer.longest = 10**9  # a vocabulary with one very long token
    assert tokenizer.exceeds(text, 100)
    assert sum(told) <= LONG
    for count in (10, 1000, 5000):
        for piece in ("hello", " " * 90, "\u00e9\u4e00", "a b\n"):
            text = piece * (count // 3)
            many = len(fake_tokenizer().encode(text, add_special_tokens=False))
            assert not tokenizer.exceeds(text, many)
    text, says = "ab " * 60_000, "the prompt has more than 5000 tokens"
    fails(client.post("/v1/completions", json={"prompt": text}), 400, says, "prompt")
    chat = {"messages": [{"role": "user", "content": text}]}
    fails(client.post("/v1/chat/completions", json=chat), 400, says, "messages")
    says = "the text has more than 20000 tokens"
    fails(client.post("/tokenize", json={"prompt": text}), 400, says, "prompt")
    for name in ("stop", "bad_words"):
        body = ASK | {name: ["a" * 1025]}
        fails(client.post("/v1/completions", json=body), 400, " characters", name)


def test_pieces_of_a_text_may_have_more_tokens_than_all_of_it() -> None:
    class Sparse(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [0] * (len(text) // 16 + 1)

    tokenizer, text = Sparse(backend_tokenizer()), "a" * 3 * LONG
    tokenizer.longest = 10**9
    assert not tokenizer.exceeds(text, len(tokenizer.encode(text)))
    assert tokenizer.exceeds(text, 1000)


def test_an_event_costs_what_it_says() -> None:
    """A stream's offsets count on: no event reads the tokens before it."""
    read: list[int] = []

    class Answer(CompletionAnswer):
        def decode_for_logprobs(self, token: int) -> tuple[str, list[int] | None]:
            read.append(token)
            return "ab", None

    choice = AnswerChoice(0, [5], SamplingParams(logprobs=0))
    answer = Answer("m", CompletionBody(prompt="", logprobs=0), [choice])
    scored = tuple(TokenLogprobs(token, -1.0, ()) for token in (7, 8))
    offsets = []
    for at in range(0, 1200, 4):
        span = Span("abab", False)
        chunk = Chunk((span,), (7, 8), (True, False), logprobs=scored, starts=(at, at + 2))
        event = answer.event(choice, chunk, choice.take(chunk))
        assert event is not None
        offsets += event["choices"][0]["logprobs"]["text_offset"]
    assert offsets == list(range(0, 1200, 2))
    assert len(read) == 1200  # each twice
    assert choice.join_text("content") == "ab" * 600


def test_jobs_of_a_pool() -> None:
    """One too many is refused, those with the same key count once, one that nobody awaits ends."""
    go, done = threading.Event(), []

    def work(name: str) -> str:
        go.wait(20)
        done.append(name)
        return name

    async def asked() -> None:
        pool = Pool("test", 1, 2, "too many")
        runs = [asyncio.create_task(pool.run(key, work, key)) for key in ("a", "b", "b")]
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="too many") as refused:
            await pool.run("c", work, "c")
        assert refused.value.status == 429
        for run in runs[1:]:
            run.cancel()
        await asyncio.sleep(0.05)
        last = asyncio.create_task(pool.run("c", work, "c"))
        await asyncio.sleep(0.05)
        go.set()
        assert await runs[0] == "a"
        assert await last == "c"
        assert done == ["a", "c"]

    asyncio.run(asked())


def test_forms_of_clients_that_have_gone_are_dropped() -> None:
    """Two threads compile, the rest waits: it counts as load, and ends with its client."""
    go, begun = threading.Event(), list[str | None]()

    class Compiling(Engine):
        def prepare(
            self, prompt: Prompt, params: SamplingParams | None = None, **observed: Any
        ) -> Request:
            if params is not None and (form := params.structured_outputs):
                begun.append(form.regex)
                go.wait(30)
                params = replace(params, structured_outputs=None)
            return super().prepare(prompt, params, **observed)

    manifest = fake_manifest(max_batch=2, max_seq_len=5000, prefill_chunk=64)
    engine = Compiling(FakePrograms(manifest), manifest, fake_tokenizer())

    def ask(form: str, seconds: float) -> int:
        brief = httpx2.Timeout(20, read=seconds)
        body = ASK | {"structured_outputs": {"regex": form}}
        with server.client() as client:
            return client.post("/v1/completions", json=body, timeout=brief).status_code

    with engine, live(engine) as server, ThreadPoolExecutor() as pool:
        gone = [pool.submit(ask, f"{i}", 1.0) for i in range(4)]
        until(lambda: server.service.open == 4)
        with server.client() as client:
            assert client.get("/load").json() == {"server_load": 4}
            assert client.post("/v1/completions", json=ASK).status_code == 200
        for each in gone:
            with pytest.raises(httpx2.ReadTimeout):
                each.result()
        until(lambda: server.service.open == 0)
        last = pool.submit(ask, "last", 20.0)
        until(lambda: server.service.open == 1)
        go.set()
        assert last.result() == 200
    assert len(begun) == 3, "two had begun, and two were dropped"
    assert begun[-1] == "last"


def test_the_log_has_no_queries(caplog: pytest.LogCaptureFixture) -> None:
    settings = ServerOptions(access_log=True, key="right", allow_origin=["http://a"])
    preflight = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
    with (
        caplog.at_level(logging.INFO, "mtpbuild"),
        served(settings=settings) as (server, _),
        server.client() as client,
    ):
        client.get("/v1/models?key=secret")
        client.get("/health?key=secret")
        client.get("/none?key=secret", headers={"Authorization": "Bearer right"})
        client.options("/v1/models?key=secret", headers=preflight)
    output = [record.getMessage() for record in caplog.records if record.name == "mtpbuild.access"]
    assert [line.split('"')[1] for line in output] == [
        "GET /v1/models HTTP/1.1", "GET /health HTTP/1.1", "GET /none HTTP/1.1",
        "OPTIONS /v1/models HTTP/1.1",
    ]  # fmt: skip
    assert "secret" not in caplog.text


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[int, str]]:
    """Yield a server in a process of its own: its number and its address."""
    command = [sys.executable, "-m", "tests.support.fake_server", "0", "0", "5", "quiet"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:
        yield running.pid, url_of(running).removeprefix("http://")
        running.send_signal(signal.SIGTERM)


def megabytes(pid: int, name: str) -> int:
    """Read VmRSS, the memory in use, or VmHWM, the most since `clear_refs` was written."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(rf"{name}:\s+(\d+)", status)[0]) // 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in BODIES if n not in QUICK)]
)
def test_nobody_waits_for_a_body(name: str, process: tuple[int, str]) -> None:
    """While it is read /health answers, and memory stays; the answer is one error or a text."""
    (pid, address), (path, make_body) = process, BODIES[name]
    body = make_body()
    waits, over = list[float](), threading.Event()

    def probe() -> None:
        while not over.is_set():
            began = time.monotonic()
            connection = http.client.HTTPConnection(address, timeout=60)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            connection.close()
            waits.append(time.monotonic() - began)
            time.sleep(0.01)

    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before, prober = megabytes(pid, "VmRSS"), threading.Thread(target=probe)
    prober.start()
    try:
        status, output = post(address, path, body, timeout=120)
    finally:
        over.set()
        prober.join()
    assert status in (200, 400, 404, 413, 429), output[:300]
    assert status == 200 or len(output) < 1000
    assert waits, "no probe of /health ended"
    assert max(waits) < WAIT * SLOW
    took = megabytes(pid, "VmHWM") - before
    assert took < MEMORY + len(output) / 2**20
