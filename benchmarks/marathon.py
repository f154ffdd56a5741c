"""Sends many clients, some of them misbehaving, to one server, and checks that it stays healthy.

python benchmarks/marathon.py engines/tiny_n3_b8
python benchmarks/marathon.py engines/tiny_n3_b8 --requests 200

A third of the requests is cancelled at a random moment, some clients are killed, and some send
malformed requests. Canary requests in between must get the same tokens as on an idle server. At the
end no slot may be taken, no request waiting and no thread left over. Without the rows that ended
requests leave, the process may have grown by at most 5 % since its first 200 requests. These rows
may fill the memory that they are allowed, and no more. With fewer than 1,000 requests memory is not
judged, as it has not settled. The exit code is 1 if something is wrong.
"""

import asyncio
import contextlib
import json
import random
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil
from script import parse_flags, served

QUESTIONS = ("What is 47 + 85?", "What is 912 - 388?", "Sort these numbers: 42, 7, 19, 88")
CODE = ("def fibonacci(n):", "import os\nimport sys\n\n", "class Stack:\n    def __init__(self):\n")
PATIENCE = 120  # seconds for one request
MOST_GROWTH = 0.05
POOL = 4_000_000  # bytes for rows of ended requests, fewer than the requests leave
SETTLED, ENOUGH = 200, 1000  # requests: before the level is measured; needed to judge memory


@dataclass
class Tally:
    """The outcomes of the requests, and a list of what went wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    level: float = 0  # resident bytes after the first SETTLED requests, without the pool's
    threads: int = 0  # threads at that time


class Marathon:
    """Clients that share a number of requests among them."""

    def __init__(self, url: str, process: psutil.Process, requests: int, seed: int) -> None:
        self.url, self.process, self.requests = url, process, requests
        self.random, self.tally = random.Random(seed), Tally()
        self.started = self.done = 0
        self.canaries: dict[str, list[int]] = {}

    async def run(self, clients: int) -> None:
        async with httpx2.AsyncClient(
            base_url=self.url, timeout=PATIENCE, trust_env=False, limits=httpx2.Limits()
        ) as http:
            for prompt in CODE:
                self.canaries[prompt] = await self.canary(http, prompt)
            await asyncio.gather(*(self.client(http) for _ in range(clients)))
            await self.settled(http)

    async def client(self, http: httpx2.AsyncClient) -> None:
        kinds = (self.whole, self.stream, self.cancelled, self.killed, self.malformed, self.checked)
        while self.started < self.requests:
            self.started += 1
            (ask,) = self.random.choices(kinds, weights=(20, 20, 33, 8, 7, 12))
            try:
                outcome = await asyncio.wait_for(ask(http), PATIENCE)
            except (httpx2.HTTPError, TimeoutError, ValueError, KeyError) as error:
                outcome = f"failed: {type(error).__name__}"
                self.tally.wrong.append(f"{ask.__name__}: {error!r}")
            self.tally.outcomes[outcome] += 1
            self.done += 1
            if self.done == min(SETTLED, max(1, self.requests // 2)):
                self.tally.level = await self.resident(http)
                self.tally.threads = self.process.num_threads()

    def body(self, **more: Any) -> dict[str, Any]:
        """Make a request of any length, greedy or sampled; some prompts have many chunks."""
        chance = self.random
        prompt = chance.choice(CODE) * chance.choice((1, 1, 1, 4, 20))
        settings = {"temperature": chance.choice((0, 0.8)), "max_tokens": chance.randint(1, 80)}
        return {"prompt": prompt, "ignore_eos": True, **settings, **more}

    async def whole(self, http: httpx2.AsyncClient) -> str:
        if self.random.random() < 0.5:
            asked = [{"role": "user", "content": self.random.choice(QUESTIONS)}]
            body = {"messages": asked, "max_tokens": 60}
            response = await http.post("/v1/chat/completions", json=body)
        else:
            response = await http.post("/v1/completions", json=self.body())
        response.raise_for_status()
        return "whole" if response.json()["choices"][0]["finish_reason"] else "cut"

    async def stream(self, http: httpx2.AsyncClient) -> str:
        body = self.body(stream=True)
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            lines = [line async for line in response.aiter_lines() if line]
        if lines[-1] != "data: [DONE]":
            raise ValueError(lines[-1])
        return "streamed"

    async def cancelled(self, http: httpx2.AsyncClient) -> str:
        """Cancel a request at a random moment: before its answer begins, or in the middle of it."""
        body = self.body(stream=self.random.random() < 0.7, max_tokens=400)

        async def ask() -> None:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    pass

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ask(), self.random.uniform(0.0, 0.5))
            return "cancelled too late"
        return "cancelled"

    async def killed(self, http: httpx2.AsyncClient) -> str:
        """Break off the connection without closing it properly."""
        address = httpx2.URL(self.url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        body = json.dumps(self.body(stream=True, max_tokens=400)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        sent = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
        writer.write(sent[: self.random.choice((len(sent), len(sent) // 2))])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), self.random.uniform(0.0, 0.3))
        linger = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
        own = writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        return "killed"

    async def malformed(self, http: httpx2.AsyncClient) -> str:
        bodies = (b"{", b"[]", b'{"prompt": 7}', b'{"prompt": "x", "max_tokens": -1}', b"\xff\x00")
        body = self.random.choice(bodies)
        response = await http.post("/v1/completions", content=body)
        if response.status_code != 400 or "error" not in response.json():
            raise ValueError(f"{response.status_code} for {body!r}")
        return "malformed"

    async def checked(self, http: httpx2.AsyncClient) -> str:
        prompt = self.random.choice(CODE)
        got = await self.canary(http, prompt)
        if got != self.canaries[prompt]:
            raise ValueError(f"a canary got {got} instead of {self.canaries[prompt]}")
        return "canary"

    async def canary(self, http: httpx2.AsyncClient, prompt: str) -> list[int]:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 40, "return_token_ids": True}
        response = await http.post("/v1/completions", json=body)
        response.raise_for_status()
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    async def settled(self, http: httpx2.AsyncClient) -> None:
        """Check that no request is left at the end, and that nothing has grown."""
        for _ in range(100):
            waits = "num_requests_running", "num_requests_waiting"
            running, waiting = await self.gauges(http, *waits)
            if running == waiting == 0:
                break
            await asyncio.sleep(0.1)
        else:
            self.tally.wrong.append(f"{running:g} slots taken, {waiting:g} requests wait")
        growth = await self.resident(http) / self.tally.level - 1
        if growth > MOST_GROWTH and self.requests >= ENOUGH:
            self.tally.wrong.append(f"memory has grown by {growth:.1%}")
        if (threads := self.process.num_threads()) > self.tally.threads:
            self.tally.wrong.append(f"{threads} threads, it had {self.tally.threads}")
        print(f"memory {growth:+.1%}, {threads} threads")

    async def resident(self, http: httpx2.AsyncClient) -> float:
        """Return the process's memory without the rows that ended requests have left."""
        pool, limit = await self.gauges(http, "prefix_pool_bytes", "prefix_pool_limit_bytes")
        if not 0 < pool <= limit:
            self.tally.wrong.append(f"the pool has {pool:g} bytes of {limit:g}")
        return self.process.memory_info().rss - pool

    async def gauges(self, http: httpx2.AsyncClient, *names: str) -> tuple[float, ...]:
        lines = (await http.get("/metrics")).text.splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return tuple(
            next(float(value) for line, value in found.items() if line.startswith(f"vllm:{name}{{"))
            for name in names
        )


def main() -> None:
    arguments = parse_flags(__doc__, "engine", requests=2000, clients=32, seed=0)
    with served(arguments.engine, "--prefix-cache-bytes", str(POOL)) as (url, server):
        process = psutil.Process(server.pid)
        marathon = Marathon(url, process, arguments.requests, arguments.seed)
        start = time.perf_counter()
        asyncio.run(marathon.run(arguments.clients))
        seconds = time.perf_counter() - start
    print(f"{arguments.requests} requests of {arguments.clients} clients in {seconds:.0f} s")
    print(", ".join(f"{n} {outcome}" for outcome, n in sorted(marathon.tally.outcomes.items())))
    for line in marathon.tally.wrong:
        print(f"wrong: {line}")
    sys.exit(bool(marathon.tally.wrong))


if __name__ == "__main__":
    main()
