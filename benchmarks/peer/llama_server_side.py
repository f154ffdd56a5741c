"""llama.cpp's server with drafts of its MTP module, for `one_machine.py`; side.py has the protocol.

The server cannot be made to accept drafts at a given rate, and of random weights it accepts next to
none. So an answer has the seconds of a step, from the server's own clock: a step makes `window` - 1
drafts, verifies them and takes the rejected ones back.
"""

import atexit
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from side import Answer, Ask, serve, tokens

PATIENCE = 600  # most seconds to load, or for an answer


class Server:
    def __init__(self, job: Ask) -> None:
        self.vocabulary, drafts = job["vocabulary"], job["asks"][0]["window"] - 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = Path(sys.executable).with_name("llama-server")
        command = [str(program), "--model", job["path"], "--port", str(port), "-np", "1"]
        command += ["--ctx-size", str(job["rows"]), "--threads", str(job["threads"])]
        command += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(drafts)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        atexit.register(self.process.kill)
        self.url = f"http://127.0.0.1:{port}"
        self.wait()

    def wait(self) -> None:
        """Waits until the model is loaded."""
        for _ in range(10 * PATIENCE):
            try:
                self.ask("/health")
                return
            except urllib.error.URLError:
                if self.process.poll() is not None:
                    raise SystemExit(f"llama-server ended with {self.process.returncode}") from None
            time.sleep(0.1)
        raise SystemExit(f"llama-server did not load within {PATIENCE} s")

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            self.url + path, data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE) as said:
            answer: dict[str, Any] = json.load(said)
        return answer

    def complete(self, prompt: list[int], count: int) -> dict[str, Any]:
        """Returns the server's times and numbers of a greedy completion of `count` tokens."""
        body = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True}
        timings: dict[str, Any] = self.ask("/completion", body | {"cache_prompt": False})["timings"]
        return timings

    def prompt(self, tokens: list[int]) -> None:
        self.complete(tokens, 1)

    def decode(self, ask: Ask) -> Answer:
        said = self.complete(tokens(ask["context"], self.vocabulary), 1 + ask["steps"])
        accepted = said["draft_n_accepted"]
        steps = said["predicted_n"] - 1 - accepted  # the first token comes with the prompt
        seconds = said["predicted_ms"] / 1000 / steps
        return {"step_s": seconds, "drafts": said["draft_n"], "accepted": accepted}


if __name__ == "__main__":
    serve(Server)
