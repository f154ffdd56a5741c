"""Measures tokens per second and latencies over HTTP, with 1, 4, 8 and 16 users.

python benchmarks/serving.py engines/tiny_n0_b8 engines/tiny_n3_b8 --llama-server f32
python benchmarks/serving.py engines/tiny_n3_b8 --peer other=http://127.0.0.1:8080

`mtpbuild serve` serves each engine; the table also shows the speed of `Engine.stream` for one user.
--llama-server runs llama.cpp's server (tools/peers_env.sh compiles it) with --model's weights in
that type and 8 slots; --llama-drafts N adds one that drafts N tokens with qwen-tiny's MTP module. A
peer is any running server of OpenAI's API. All get the same greedy, streamed completions; a user
sends the next one as soon as the last has ended. Servers take turns, round after round, each after
eight requests that are not counted; figures are the rounds' medians.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx2
from peer.llama_server import started
from rich.console import Console
from rich.table import Table
from script import PEERS, convert, run, served

from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.limits import measure_limits

PROMPTS = (
    "def fibonacci(n):",
    "import os\nimport sys\n\n",
    "class Stack:\n    def __init__(self):\n",
    "for i in range(10):\n    ",
    "def read(self, size=-1):\n    ",
    "with open(path, 'rb') as f:\n    ",
    "return [x for x in ",
    "async def main():\n    await ",
)
PATIENCE = 300
LLAMA = "llama-server"
SLOTS, LENGTH = 8, 1024  # of llama-server: slots, and tokens of each


@dataclass
class Load:
    """The figures of some concurrent users."""

    users: int
    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first piece of text
    between: list[float] = field(default_factory=list)  # seconds between pieces

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@contextlib.contextmanager
def ours(engine: Path) -> Iterator[str]:
    with served(engine) as (url, _):
        yield url


def running(url: str) -> contextlib.AbstractContextManager[str]:
    return contextlib.nullcontext(url)


async def one(http: httpx2.AsyncClient, prompt: str, tokens: int, load: Load) -> None:
    """Request one streamed completion, and record its times in `load`."""
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = start = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if event["choices"]:
                (load.first if last == start else load.between).append(now - last)
                last = now
            load.tokens += (event.get("usage") or {}).get("completion_tokens", 0)


async def measure(url: str, users: int, requests: int, tokens: int) -> Load:
    """Run some users at once; each sends its requests one after the other."""
    load = Load(users)

    async def user(http: httpx2.AsyncClient, number: int) -> None:
        for i in range(requests):
            await one(http, PROMPTS[(number + i) % len(PROMPTS)], tokens, load)

    # Each request has its own connection: llama-server closes some that it promised to keep.
    limits = httpx2.Limits(max_keepalive_connections=0)
    asking = httpx2.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False, limits=limits)
    async with asking as http:
        await asyncio.gather(*(one(http, prompt, 8, Load(1)) for prompt in PROMPTS))
        start = time.perf_counter()
        await asyncio.gather(*(user(http, number) for number in range(users)))
        load.seconds = time.perf_counter() - start
    return load


def direct(engine: Path, requests: int, tokens: int) -> float:
    """Measure the tokens per second of `Engine.stream` for one user."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with Engine.load(engine, prefix_cache=False) as loaded:
        list(loaded.stream(PROMPTS[0], SamplingParams(max_tokens=8)))
        start = time.perf_counter()
        for i in range(requests):
            for _ in loaded.stream(PROMPTS[i % len(PROMPTS)], params):
                pass
        return requests * tokens / (time.perf_counter() - start)


def quantile(values: list[float], share: float) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


@dataclass
class Server:
    """One of the servers that take turns; direct: rates of `Engine.stream`, per round."""

    name: str
    start: Callable[[], contextlib.AbstractContextManager[str]]
    engine: Path | None = None
    loads: dict[int, list[Load]] = field(default_factory=dict)  # by number of users
    direct: list[float] = field(default_factory=list)

    def rate(self, users: int) -> float:
        return statistics.median(load.rate for load in self.loads[users])

    def cells(self, users: int) -> Iterator[str]:
        yield f"{self.rate(users):.0f}"
        for kind in ("first", "between"):
            for share in (0.5, 0.99):
                seconds = (quantile(getattr(load, kind), share) for load in self.loads[users])
                yield f"{1000 * statistics.median(seconds):.1f}"


def table(servers: list[Server], users: list[int]) -> Table:
    columns = ("server", "users", "tokens/s", "first token, ms: median", "p99")
    grid = Table(*columns, "between pieces, ms: median", "p99")
    for server in servers:
        if server.direct:
            rate = statistics.median(server.direct)
            grid.add_row(f"{server.name}, Engine.stream", "1", f"{rate:.0f}")
        for count in users:
            grid.add_row(server.name, str(count), *server.cells(count))
    return grid


def ratios(servers: list[Server], users: list[int]) -> Iterator[str]:
    """Compute the ratios of the aims: one user to `Engine.stream`, servers to llama-server."""
    for server in servers:
        if server.direct and 1 in users:
            share = server.rate(1) / statistics.median(server.direct)
            yield f"{server.name}, one user over Engine.stream: {share:.2f} (aim 0.9)"
    others = [server for server in servers if server.name.startswith(LLAMA)]
    for other in others:
        for server in (s for s in servers if s.engine):
            told = ", ".join(f"{n}: {server.rate(n) / other.rate(n):.2f}" for n in users)
            yield f"{server.name} over {other.name}, by users: {told} (aim 1.5 at 8)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", type=Path)
    parser.add_argument("--peer", action="append", default=[], help="NAME=URL")
    parser.add_argument("--llama-server", action="append", default=[], choices=("f32", "q8_0"))
    parser.add_argument("--llama-drafts", type=int, default=0)
    parser.add_argument("--model", default="deepseek-tiny", help="weights of --llama-server")
    parser.add_argument("--users", default="1,4,8,16")
    parser.add_argument("--requests", type=int, default=4, help="requests of each user")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    users = [int(count) for count in arguments.users.split(",")]
    servers = [Server(path.name, partial(ours, path), path) for path in arguments.engines]
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.llama_server:
            weights = Path(folder) / f"{kind}.gguf"
            convert(find_model(arguments.model).folder, weights, kind, "--tokenizer")
            for drafts in sorted({0, arguments.llama_drafts}):
                room = {
                    "slots": SLOTS,
                    "rows": SLOTS * LENGTH,
                    "threads": measure_limits().processors,
                }
                start = partial(started, PEERS / LLAMA, weights, drafts=drafts, **room)
                name = f"{LLAMA} {kind}" + (f", {drafts} drafts" if drafts else "")
                servers.append(Server(name, start))
        for peer in arguments.peer:
            name, _, url = peer.partition("=")
            servers.append(Server(name, partial(running, url)))
        for _ in range(arguments.rounds):
            for server in servers:
                if server.engine:
                    rate = direct(server.engine, arguments.requests, arguments.tokens)
                    server.direct.append(rate)
                with server.start() as url:
                    for count in users:
                        work = measure(url, count, arguments.requests, arguments.tokens)
                        server.loads.setdefault(count, []).append(asyncio.run(work))
    console = Console()
    console.print(table(servers, users))
    for line in ratios(servers, users):
        console.print(line)


if __name__ == "__main__":
    run(main)
