"""Measures tokens per second and latencies over HTTP, with 1, 4, 8 and 16 users.

python benchmarks/serving.py engines/tiny_n0_b8 engines/tiny_n3_b8 --llama-server f32
python benchmarks/serving.py engines/tiny_n3_b8 --peer other=http://127.0.0.1:8080
python benchmarks/serving.py --shape qwen3.5-4b --rounds 5   # 20 GB of disk; --quick: 4 layers

`mtpbuild serve` serves each engine; the table also shows the speed of `Engine.stream` for one user,
and of `Engine.generate` for several. The client shares the machine with the server, so it is made
of plain sockets: a library for HTTP takes more of the processor for a piece than a server does.
--llama-server runs llama.cpp's server (tools/peers_env.sh compiles it) with --model's weights in
that type and 8 slots; --llama-drafts N adds one that drafts N tokens with qwen-tiny's MTP module. A
peer is any running server of OpenAI's API. All get the same greedy, streamed completions; a user
sends the next one as soon as the last has ended. Servers take turns, round after round, each after
eight requests that are not counted; figures are the rounds' medians.

--shape measures a published shape with random weights: our engines in int4 with int8 caches,
without drafts, with --nextn and `--nextn auto`, each draft accepted with probability --accepted
(synthetic acceptance); and llama-server in Q4_0 with f16 caches, without drafts; 16 slots each.
Prompts are 500 random ids, answers 200 tokens. --out gets the figures as JSON, with machine and
date.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from one.files import Workshop
from one.shapes import published
from peer.llama_server import started
from rich.console import Console
from rich.table import Table
from script import PEERS, convert, run
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.lab.measure.host import describe_machine
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import UsageError
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
PATIENCE = 3600  # seconds for one number of users
SYNTHETIC = """
import json, sys
from functools import partial
from mtpbuild.builder.cli import app
from mtpbuild.runtime.server import params
how = {"acceptance": "rejection", "rejection_sample_method": "synthetic"}
how["synthetic_acceptance_rates"] = json.loads(sys.argv.pop(1))
params.SamplingParams = partial(params.SamplingParams, **how)
app()
"""
LLAMA, PLAIN = "llama-server", "nextn 0"
SLOTS, LENGTH = 8, 1024  # of llama-server: slots, and tokens of each
USERS = 16  # most users of a shape


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
def ours(engine: Path, rates: Sequence[float] = ()) -> Iterator[str]:
    """Run `mtpbuild serve` on a free port; yield its address.

    rates: of synthetic acceptance, which the server refuses from clients.

    The server's log is read and dropped, so that the server never waits for a reader.
    """
    program = ["-c", SYNTHETIC, json.dumps(rates)] if rates else ["-m", "mtpbuild"]
    command = [sys.executable, *program, "serve", "--engine", str(engine), "--port", "0"]
    command.append("--no-access-log")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next((line for line in process.stderr if line.startswith("serving")), None)
        if line is None:
            sys.exit(f"mtpbuild serve --engine {engine} ended with {process.wait()}")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield line.split()[-1]
        finally:
            process.terminate()


def running(url: str) -> contextlib.AbstractContextManager[str]:
    return contextlib.nullcontext(url)


@dataclass(frozen=True)
class Work:
    """The requests of each user: how many, tokens of an answer, and of prompts of random ids.

    vocabulary: of such prompts, of which no two are alike, so that no cache helps; 0: PROMPTS.
    """

    requests: int
    tokens: int
    length: int = 0
    vocabulary: int = 0

    def choose_prompt(self, users: int, user: int, request: int) -> str | list[int]:
        if not self.vocabulary:
            return PROMPTS[(user + request) % len(PROMPTS)]
        rng = random.Random(f"{users} {user} {request}")
        return [rng.randrange(self.vocabulary) for _ in range(self.length)]

    @property
    def warm_up(self) -> list[str | list[int]]:
        return [self.choose_prompt(0, user, 0) for user in range(len(PROMPTS))]


async def one(url: str, prompt: str | list[int], tokens: int, load: Load) -> None:
    """Request one streamed completion on a connection of its own; record its times in `load`."""
    asked = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body, address = json.dumps(asked), urlsplit(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    last = start = time.perf_counter()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write((head + body).encode())
    if b" 200 " not in (status := await reader.readline()):
        raise UsageError(f"{url} answers {status.decode().strip()}")
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        now, event = time.perf_counter(), json.loads(line[6:])
        if event["choices"]:
            (load.first if last == start else load.between).append(now - last)
            last = now
        load.tokens += (event.get("usage") or {}).get("completion_tokens", 0)
    writer.close()


async def measure(url: str, users: int, work: Work) -> Load:
    """Run some users at once; each sends its requests one after the other."""
    load = Load(users)

    async def user(number: int) -> None:
        for i in range(work.requests):
            await one(url, work.choose_prompt(users, number, i), work.tokens, load)

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(one(url, prompt, 8, Load(1)) for prompt in work.warm_up))
        start = time.perf_counter()
        await asyncio.gather(*(user(number) for number in range(users)))
        load.seconds = time.perf_counter() - start
    return load


def direct(engine: Path, users: int, work: Work) -> float:
    """Measure the tokens per second in this process: `Engine.stream` for one user, or `generate`.

    Several users' requests wait in one queue, in the order in which the users would send them.
    """
    params = SamplingParams(max_tokens=work.tokens, ignore_eos=True)
    every = ((user, i) for i in range(work.requests) for user in range(users))
    prompts = [work.choose_prompt(users, user, i) for user, i in every]
    with Engine.load(engine, prefix_cache=False) as loaded:
        loaded.generate(work.warm_up, SamplingParams(max_tokens=8))
        start = time.perf_counter()
        if users == 1:
            for prompt in prompts:
                list(loaded.stream(prompt, params))
        else:
            loaded.generate(prompts, params)
        return len(prompts) * work.tokens / (time.perf_counter() - start)


def quantile(values: list[float], share: float) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


@dataclass
class Server:
    """One of the servers that take turns; direct: an engine's rates in this process, by users.

    inside: whether an engine is measured there, too.
    """

    name: str
    start: Callable[[], contextlib.AbstractContextManager[str]]
    engine: Path | None = None  # None: of others
    inside: bool = True
    loads: dict[int, list[Load]] = field(default_factory=dict)  # by number of users
    direct: dict[int, list[float]] = field(default_factory=dict)

    def rate(self, users: int) -> float:
        return statistics.median(load.rate for load in self.loads[users])

    def run(self, users: list[int], work: Work) -> None:
        """Measure a round."""
        if self.engine and self.inside:
            for count in users:
                rate = direct(self.engine, count, work)
                self.direct.setdefault(count, []).append(rate)
        with self.start() as url:
            for count in users:
                load = asyncio.run(measure(url, count, work))
                self.loads.setdefault(count, []).append(load)

    def median_over(self, other: "Server", users: int) -> float:
        """Return the median ratio of tokens/s to another server's in the same round."""
        pairs = zip(self.loads[users], other.loads[users], strict=True)
        return statistics.median(load.rate / beside.rate for load, beside in pairs)

    def shares(self) -> Iterator[tuple[int, float]]:
        """Yield the share of the engine's own tokens/s that users get over HTTP, by users."""
        for users, rates in self.direct.items():
            yield users, self.rate(users) / statistics.median(rates)

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
        for count, rates in server.direct.items():
            rate = f"{statistics.median(rates):.0f}"
            grid.add_row(f"{server.name}, in this process", str(count), rate)
        for count in users:
            grid.add_row(server.name, str(count), *server.cells(count))
    return grid


def ratios(servers: list[Server], users: list[int]) -> Iterator[str]:
    """Compute the ratios of the aims: users over HTTP to in this process, and to llama-server."""
    for server in servers:
        if told := ", ".join(f"{count}: {share:.2f}" for count, share in server.shares()):
            yield f"{server.name}, over HTTP to in this process, by users: {told} (aim 0.95 at 1)"
    for plain in (server for server in servers if server.name == PLAIN):
        for server in (s for s in servers if s.engine and s is not plain):
            told = ", ".join(f"{n}: {server.median_over(plain, n):.2f}" for n in users)
            yield f"{server.name} over {PLAIN}, median of pairs, by users: {told}"
    others = [server for server in servers if server.name.startswith(LLAMA)]
    for other in others:
        for server in (s for s in servers if s.engine):
            told = ", ".join(f"{n}: {server.rate(n) / other.rate(n):.2f}" for n in users)
            yield f"{server.name} over {other.name}, by users: {told} (aim 3.5 at 8)"


def list_shape_servers(
    folder: Path, name: str, layers: int | None, nextn: int, accepted: float
) -> list[Server]:
    """Write a shape's files, and return our servers and llama.cpp's."""
    shop = Workshop(folder, published(name, layers), lambda text: print(text, file=sys.stderr))
    shop.checkpoint.mkdir(parents=True)
    vocabulary = {f"<{i}>": i for i in range(shop.vocabulary)}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(shop.checkpoint / "tokenizer.json"))
    shop.write_checkpoint()
    flags = ("--cache-dtype", "int8", "--max-batch", str(USERS), "--max-seq-len", str(LENGTH))
    numbers = (0, nextn, "auto")
    engines = dict(zip(numbers, shop.build("engines", numbers, *flags), strict=True))
    shop.drop_checkpoint()
    gguf, _ = shop.write_gguf(module=True)
    servers = [Server(PLAIN, partial(ours, engines[0]), engines[0], inside=False)]
    for number in (nextn, "auto"):
        drafts = read_manifest(engines[number]).build.nextn
        start = partial(ours, engines[number], [accepted**k for k in range(1, drafts + 1)])
        servers.append(Server(f"nextn {number}", start, engines[number], inside=False))
    room: dict[str, Any] = {
        "slots": USERS,
        "rows": USERS * LENGTH,
        "threads": measure_limits().processors,
    }
    servers.append(Server(f"{LLAMA} Q4_0", partial(started, PEERS / LLAMA, gguf, **room)))
    return servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", help="a recipe, such as qwen3.5-4b")
    parser.add_argument("--nextn", type=int, default=2, help="of --shape")
    parser.add_argument("--accepted", type=float, default=0.8, help="of --shape: of each draft")
    parser.add_argument("--layers", type=int, help="of --shape: the most layers")
    parser.add_argument("--prompt-len", type=int, default=500, help="of --shape")
    parser.add_argument("--quick", action="store_true", help="of --shape: 4 layers, one round")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("engines", nargs="*", type=Path)
    parser.add_argument("--peer", action="append", default=[], help="NAME=URL")
    parser.add_argument("--llama-server", action="append", default=[], choices=("f32", "q8_0"))
    parser.add_argument("--llama-drafts", type=int, default=0)
    parser.add_argument("--model", default="deepseek-tiny", help="weights of --llama-server")
    parser.add_argument("--users", default="1,4,8,16")
    parser.add_argument("--requests", type=int, default=4, help="requests of each user")
    parser.add_argument("--tokens", type=int, help="of an answer: 128, with --shape 200")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.layers, arguments.rounds, arguments.requests = 4, 1, 1
    users = [int(count) for count in arguments.users.split(",")]
    work = Work(arguments.requests, arguments.tokens or 128)
    servers = [Server(path.name, partial(ours, path), path) for path in arguments.engines]
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.llama_server:
            weights = Path(folder) / f"{kind}.gguf"
            flags = ["--tokenizer", *(["--module"] if arguments.llama_drafts else [])]
            convert(find_model(arguments.model).folder, weights, kind, *flags)
            for drafts in sorted({0, arguments.llama_drafts}):
                room: dict[str, Any] = {
                    "slots": SLOTS,
                    "rows": SLOTS * LENGTH,
                    "threads": measure_limits().processors,
                }
                start = partial(started, PEERS / LLAMA, weights, drafts=drafts, **room)
                name = f"{LLAMA} {kind}" + (f", {drafts} drafts" if drafts else "")
                servers.append(Server(name, start))
        if arguments.shape:
            place = Path(folder)
            drafts = arguments.nextn, arguments.accepted
            servers += list_shape_servers(place, arguments.shape, arguments.layers, *drafts)
            vocabulary = published(arguments.shape, arguments.layers).config.vocab_size
            lengths = arguments.tokens or 200, arguments.prompt_len
            work = Work(arguments.requests, *lengths, vocabulary)
        for peer in arguments.peer:
            name, _, url = peer.partition("=")
            servers.append(Server(name, partial(running, url)))
        for _ in range(arguments.rounds):
            for server in servers:
                server.run(users, work)
    if arguments.out:
        figures = {s.name: {n: [*s.cells(n)] for n in users} for s in servers}
        machine = describe_machine(measure_limits().processors)
        arguments.out.write_text(json.dumps({"machine": machine, "figures": figures}, indent=1))
    console = Console()
    console.print(table(servers, users))
    for line in ratios(servers, users):
        console.print(line)


if __name__ == "__main__":
    run(main)
