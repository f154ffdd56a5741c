"""The server's process: what it logs, and how it ends when it has not begun."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2

ROOT = Path(__file__).parents[2]


def started(seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.fake_server", str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_a_signal_while_the_engine_is_loaded() -> None:
    with started(60) as process:
        time.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_requests_are_logged_if_asked_for() -> None:
    with started(0) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        body = {"prompt": "a\nb", "max_tokens": 2, "request_id": "x\ny"}
        response = httpx2.post(f"{url}/v1/completions", json=body, timeout=20, trust_env=False)
        assert response.status_code == 200
        line = process.stderr.readline()
        assert '"id": "x\\ny"' in line, "one line, whatever it says"
        assert '"prompt": "a\\nb"' in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""
