"""Two replicas behind Ray Serve, one of which is killed under load."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.errors import advise_install
from mtpbuild.runtime.server.server import Address, listen

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("ray") is None, reason=advise_install("ray")),
    pytest.mark.xdist_group("tiny"),
]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "serve" / "ray.yaml"
TEXTS = ("def fibonacci(n):", "import os\nimport sys\n\n", "class Stack:\n    def __init__")


def free_port() -> int:
    with listen(Address("127.0.0.1", 0, 0.0)) as own:
        port: int = own.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def folder(tiny_engine: Callable[..., Path]) -> Path:
    return tiny_engine(3)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Yield the example's two replicas, on a port of the test's own."""
    config = yaml.safe_load(EXAMPLE.read_text())
    config["http_options"]["port"] = port = free_port()
    (application,) = config["applications"]
    assert application["args"]["engine"] == "engines/tiny_n3", "what docs/serving.md builds"
    application["args"]["engine"] = str(folder)
    application["deployments"][0]["ray_actor_options"]["num_cpus"] = 0.1
    place = tmp_path_factory.mktemp("ray") / "ray.yaml"
    place.write_text(yaml.safe_dump(config))
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    with (
        (place.parent / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_driver", str(place)],
            cwd=ROOT,
            env=os.environ | quiet | {"PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            own = f"http://127.0.0.1:{port}"
            wait_for(lambda: len(replicas(process.pid)) == 2 and ready(own), 90)
            yield own, process.pid
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.fixture
def url(cluster: tuple[str, int]) -> str:
    return cluster[0]


def wait_for(condition: Callable[[], bool], seconds: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it takes too long"
        time.sleep(0.2)
    return time.monotonic() - began


def ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def replicas(driver: int) -> list[int]:
    """Find the processes with a replica below the driver."""
    parents, found = dict[int, int](), list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = parent_of(folder)
            if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:mtpbuild"):
                found.append(int(folder.name))
    return [process for process in found if driver in ancestors(process, parents)]


def parent_of(folder: Path) -> int:
    return int((folder / "stat").read_text().rpartition(")")[2].split()[1])


def ancestors(process: int, parents: dict[int, int]) -> set[int]:
    found = set[int]()
    while process := parents.get(process, 0):
        found.add(process)
    return found


Outcomes = Counter[tuple[int, str]]


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "temperature": 0, "max_tokens": 60, "return_token_ids": True, **more}


def test_answers_are_the_engines(url: str, folder: Path) -> None:
    """Each text is asked for often enough that both replicas have answered it."""
    with Engine.load(folder, threads=1) as engine:
        wanted = {t: engine.generate(t, SamplingParams(max_tokens=60)).token_ids for t in TEXTS}
    for text in TEXTS * 6:
        answer = httpx2.post(f"{url}/v1/completions", json=asked(text), timeout=60).json()
        assert answer["choices"][0]["token_ids"] == wanted[text]
    with httpx2.stream(
        "POST", f"{url}/v1/completions", json=asked(TEXTS[0], stream=True), timeout=60
    ) as response:
        pieces, output = 0, list[int]()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        output += json.loads(line)["choices"][0]["token_ids"]
        pieces += 1
    assert output == wanted[TEXTS[0]]
    assert pieces > 5


async def one(client: httpx2.AsyncClient, text: str, begun: list[int]) -> tuple[int, str]:
    """Ask, as a stream; return which replica's process answered, 0 if none, and how it ended."""
    replica = 0
    body = asked(text, stream=True, max_tokens=1000, ignore_eos=True)
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return replica, f"status {response.status_code}"
            last, replica = "", int(response.headers["x-replica"].rpartition(":")[2])
            async for line in response.aiter_lines():
                if not last:
                    begun.append(replica)
                last = line or last
            return replica, "done" if last == "data: [DONE]" else "ended without [DONE]"
    except httpx2.TransportError:
        return replica, "cut"


def test_a_replica_that_is_killed(cluster: tuple[str, int]) -> None:
    """Requests to it fail so that clients ask again; the others' do not; soon there are two."""

    async def main() -> tuple[Outcomes, Outcomes]:
        async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            begun = list[int]()
            tasks = list[asyncio.Task[tuple[int, str]]]()
            for text in TEXTS * 4:
                tasks.append(asyncio.create_task(one(client, text, begun)))
                await asyncio.sleep(0.02)  # so that Ray Serve sees who is busy
            while not {victim, survivor} <= set(begun):
                await asyncio.sleep(0.005)
            os.kill(victim, signal.SIGKILL)
            first = Counter(await asyncio.gather(*tasks))
            return first, Counter(await asyncio.gather(*(one(client, t, begun) for t in TEXTS)))

    url, driver = cluster
    victim, survivor = replicas(driver)
    first, then = asyncio.run(main())
    ended = first[victim, "cut"], first[survivor, "done"]
    assert min(ended) > 0 < sum(ended) == 12, first
    assert {outcome for _, outcome in then} == {"done"}
    assert wait_for(lambda: whole(driver, victim), 60) < 60


def whole(driver: int, killed: int) -> bool:
    now = replicas(driver)
    return len(now) == 2 and killed not in now
