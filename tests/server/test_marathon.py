"""Rude clients over a real server: a third of the requests is cancelled, some are killed.

Canary requests in between must get the same tokens as on an idle server. At the end no slot may be
taken, no request waiting and no thread left over. Without the rows that ended requests leave, the
process may have grown by at most 5 % since its first 200 requests.
"""

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.live_server import url_of

QUESTIONS = ("What is 47 + 85?", "What is 912 - 388?", "Sort these numbers: 42, 7, 19, 88")
CODE = ("def fibonacci(n):", "import os\nimport sys\n\n", "class Stack:\n    def __init__(self):\n")
PATIENCE = 120  # seconds for one request
MAX_GROWTH = 0.05
POOL = 4_000_000  # bytes for rows of ended requests, fewer than the requests leave
SETTLED, ENOUGH = 200, 1000  # requests: before the level is measured; needed to judge memory


class Marathon:
    """Clients that share a number of requests among them."""

    def __init__(self, http: httpx2.AsyncClient, process: psutil.Process, requests: int) -> None:
        self.http = http
        self.process = process
        self.requests = requests
        self.random = random.Random(0)
        self.outcomes = Counter[str]()
        self.started = 0
        self.canaries: dict[str, list[int]] = {}
        self.level = 0.0  # resident bytes after the first SETTLED requests, without the pool's
        self.threads = 0  # threads at that time

    async def run(self, clients: int) -> None:
        self.canaries = {prompt: await self.canary(prompt) for prompt in CODE}
        await asyncio.gather(*(self.client() for _ in range(clients)))
        for _ in range(100):
            if await self.gauges("num_requests_running", "num_requests_waiting") == [0, 0]:
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail("slots are taken, or requests wait")
        growth = await self.resident() / self.level - 1
        assert growth < MAX_GROWTH or self.requests < ENOUGH
        assert self.process.num_threads() <= self.threads

    async def client(self) -> None:
        kinds = (self.whole, self.stream, self.cancelled, self.killed, self.malformed, self.checked)
        while self.started < self.requests:
            self.started += 1
            (ask,) = self.random.choices(kinds, weights=(20, 20, 33, 8, 7, 12))
            await asyncio.wait_for(ask(), PATIENCE)
            self.outcomes[ask.__name__] += 1
            if self.outcomes.total() == min(SETTLED, self.requests // 2):
                self.level = await self.resident()
                self.threads = self.process.num_threads()

    def body(self, **more: Any) -> dict[str, Any]:
        """Make a request of any length, greedy or sampled; some prompts have many chunks."""
        chance = self.random
        prompt = chance.choice(CODE) * chance.choice((1, 1, 1, 4, 20))
        settings = {"temperature": chance.choice((0, 0.8)), "max_tokens": chance.randint(1, 80)}
        return {"prompt": prompt, "ignore_eos": True, **settings, **more}

    async def whole(self) -> None:
        if self.random.random() < 0.5:
            asked = [{"role": "user", "content": self.random.choice(QUESTIONS)}]
            body = {"messages": asked, "max_tokens": 60}
            response = await self.http.post("/v1/chat/completions", json=body)
        else:
            response = await self.http.post("/v1/completions", json=self.body())
        response.raise_for_status()
        assert response.json()["choices"][0]["finish_reason"]

    async def stream(self) -> None:
        body = self.body(stream=True)
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"

    async def cancelled(self) -> None:
        """Cancel a request at a random moment: before its answer begins, or in the middle of it."""
        body = self.body(stream=self.random.random() < 0.7, max_tokens=400)
        ask = self.http.post("/v1/completions", json=body)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ask, self.random.uniform(0.0, 0.5))

    async def killed(self) -> None:
        """Break off the connection without closing it properly."""
        address = self.http.base_url
        reader, writer = await asyncio.open_connection(address.host, address.port)
        body = json.dumps(self.body(stream=True, max_tokens=400)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        sent = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
        writer.write(sent[: self.random.choice((len(sent), len(sent) // 2))])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), self.random.uniform(0.0, 0.3))
        linger = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async def malformed(self) -> None:
        bodies = (b"{", b"[]", b'{"prompt": 7}', b'{"prompt": "x", "max_tokens": -1}', b"\xff\x00")
        body = self.random.choice(bodies)
        response = await self.http.post("/v1/completions", content=body)
        assert response.status_code == 400, body
        assert "error" in response.json()

    async def checked(self) -> None:
        prompt = self.random.choice(CODE)
        assert await self.canary(prompt) == self.canaries[prompt]

    async def canary(self, prompt: str) -> list[int]:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 40, "return_token_ids": True}
        response = await self.http.post("/v1/completions", json=body)
        response.raise_for_status()
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    async def resident(self) -> float:
        """Return the process's memory without the rows that ended requests have left."""
        pool, limit = await self.gauges("prefix_pool_bytes", "prefix_pool_limit_bytes")
        assert 0 < pool <= limit
        return self.process.memory_info().rss - pool

    async def gauges(self, *names: str) -> list[float]:
        lines = (await self.http.get("/metrics")).text.splitlines()
        said = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return [
            next(float(value) for line, value in said.items() if line.startswith(f"vllm:{name}{{"))
            for name in names
        ]


async def run_clients(url: str, server: int, requests: int, clients: int) -> Counter[str]:
    limits = httpx2.Limits()
    async with httpx2.AsyncClient(
        base_url=url, timeout=PATIENCE, trust_env=False, limits=limits
    ) as http:
        marathon = Marathon(http, psutil.Process(server), requests)
        await marathon.run(clients)
    return marathon.outcomes


@pytest.mark.full
@pytest.mark.xdist_group("tiny")
@pytest.mark.parametrize(("requests", "clients"), [(40, 8), (2000, 32)])
def test_the_server_is_whole_in_the_end(
    requests: int, clients: int, tiny_engine: Callable[..., Path]
) -> None:
    engine = tiny_engine(3) if requests < 1000 else tiny_engine(3, max_batch=8)
    command = [
        *(sys.executable, "-m", "mtpbuild", "serve", "--engine", str(engine), "--port", "0"),
        *("--no-access-log", "--prefix-cache-bytes", str(POOL)),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = url_of(process)
            assert process.stderr is not None
            threading.Thread(target=process.stderr.read, daemon=True).start()
            outcomes = asyncio.run(run_clients(url, process.pid, requests, clients))
        finally:
            process.terminate()
        assert process.wait(60) == 0
    assert {"checked", "cancelled"} <= set(outcomes)
