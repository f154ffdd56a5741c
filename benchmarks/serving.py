"""Tokens per second and latencies over HTTP, at 1, 4, 8 and 16 users.

python benchmarks/serving.py engines/tiny_n0_b8 engines/tiny_n3_b8
python benchmarks/serving.py engines/tiny_n3_b8 --peer llama.cpp=http://127.0.0.1:8080

Each engine is served by `mtpbuild serve`; beside it stands what `Engine.stream` gives to one user.
A peer is any server of OpenAI's API that runs already (`llama-server -np 8` of the same weights).
All get the same greedy completions, streamed, a user's next one as soon as the last has ended.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from rich.console import Console
from rich.table import Table
from script import run

from mtpbuild.runtime import Engine, SamplingParams

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


@dataclass
class Load:
    """What some users got together."""

    users: int
    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first piece of text
    between: list[float] = field(default_factory=list)  # seconds between pieces

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@contextlib.contextmanager
def served(engine: Path) -> Iterator[str]:
    """Start `mtpbuild serve` on a free port."""
    command = [sys.executable, "-m", "mtpbuild", "serve", "--engine", str(engine), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        if not line.startswith("serving"):
            sys.exit(line)
        try:
            yield line.split()[-1]
        finally:
            process.terminate()


async def one(http: httpx2.AsyncClient, prompt: str, tokens: int, load: Load) -> None:
    """One streamed completion."""
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = began = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if event["choices"]:
                (load.first if last == began else load.between).append(now - last)
                last = now
            load.tokens += (event.get("usage") or {}).get("completion_tokens", 0)


async def measure(url: str, users: int, requests: int, tokens: int) -> Load:
    """Let so many users ask so often each, one request behind the other."""
    load = Load(users)

    async def user(http: httpx2.AsyncClient, number: int) -> None:
        for i in range(requests):
            await one(http, PROMPTS[(number + i) % len(PROMPTS)], tokens, load)

    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as http:
        await one(http, PROMPTS[0], 8, Load(1))
        began = time.perf_counter()
        await asyncio.gather(*(user(http, number) for number in range(users)))
        load.seconds = time.perf_counter() - began
    return load


def direct(engine: Path, requests: int, tokens: int) -> float:
    """What `Engine.stream` gives to one user, in tokens per second."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with Engine.load(engine) as loaded:
        list(loaded.stream(PROMPTS[0], SamplingParams(max_tokens=8)))
        began = time.perf_counter()
        for i in range(requests):
            for _ in loaded.stream(PROMPTS[i % len(PROMPTS)], params):
                pass
        return requests * tokens / (time.perf_counter() - began)


def quantile(values: list[float], share: float) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", type=Path)
    parser.add_argument("--peer", action="append", default=[], help="NAME=URL")
    parser.add_argument("--users", default="1,4,8,16")
    parser.add_argument("--requests", type=int, default=4, help="of each user")
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    columns = ("server", "users", "tokens/s", "first token, ms: median", "p99")
    table = Table(*columns, "between pieces, ms: median", "p99")

    def add(name: str, url: str) -> None:
        for users in map(int, arguments.users.split(",")):
            load = asyncio.run(measure(url, users, arguments.requests, arguments.tokens))
            times = [quantile(v, q) for v in (load.first, load.between) for q in (0.5, 0.99)]
            row = (f"{load.rate:.0f}", *(f"{1000 * seconds:.1f}" for seconds in times))
            table.add_row(name, str(users), *row)

    for engine in arguments.engines:
        rate = direct(engine, arguments.requests, arguments.tokens)
        table.add_row(f"{engine.name}, Engine.stream", "1", f"{rate:.0f}")
        with served(engine) as url:
            add(engine.name, url)
    for peer in arguments.peer:
        name, _, url = peer.partition("=")
        add(name, url)
    Console().print(table)


if __name__ == "__main__":
    run(main)
