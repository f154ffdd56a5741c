"""examples/embed.py, on the loopback."""

import http.client
import json
import runpy
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mtpbuild.runtime import Engine, SamplingParams
from tests.support.fakes import fake_engine
from tests.support.live_server import post

EXAMPLE = Path(__file__).parents[2] / "examples" / "embed.py"


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine, _ = fake_engine(max_batch=2, max_seq_len=4000, step_s=0.001)
    with engine:
        yield engine


@pytest.fixture
def port(engine: Engine) -> Iterator[int]:
    with runpy.run_path(str(EXAMPLE))["serve"](engine) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60


def test_clients_get_their_texts(engine: Engine, port: int) -> None:
    prompts = [f"hello {i}" for i in range(6)]
    wanted = engine.generate(prompts, SamplingParams(max_tokens=20))
    with ThreadPoolExecutor(6) as pool:
        bodies = [json.dumps({"prompt": prompt, "max_tokens": 20}) for prompt in prompts]
        answers = [*pool.map(lambda body: post(f"127.0.0.1:{port}", "/", body), bodies)]
    assert answers == [(200, result.text.encode()) for result in wanted]


@pytest.mark.parametrize(
    "body", ["", "{", '{"prompt": ""}', '{"prompt": "a", "n": 3}', '{"prompt": "a", "stop": 5}']
)
def test_bad_requests_are_refused(port: int, body: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert post(f"127.0.0.1:{port}", "/", body)[0] == 400


def test_a_client_that_goes_away_ends_its_request(
    engine: Engine, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/", json.dumps({"prompt": "a", "max_tokens": 3900}))
    response = connection.getresponse()
    assert response.read(5)
    response.close()
    connection.close()
    deadline, output = time.monotonic() + 5, ""
    while "Error" not in output and time.monotonic() < deadline:  # the handler's thread says so
        time.sleep(0.01)
        output += capfd.readouterr().err
    assert engine.stats.requests_running == 0
    assert engine.stats.output_tokens < 3000
