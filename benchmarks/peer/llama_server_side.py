"""llama.cpp's server with drafts of an MTP module or head, for `one_machine.py`; see side.py.

side.py has the protocol. The server cannot accept drafts at a given rate, and with random weights
it accepts almost none. So an answer has the seconds of a step, from the server's own clock: a step
makes `window` - 1 drafts, verifies them and undoes the rejected ones.
"""

import atexit
import contextlib
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from llama_server import DIRECT, PATIENCE, started
from side import Answer, Ask, serve, tokens


class Server:
    def __init__(self, job: Ask) -> None:
        self.vocabulary = job["vocabulary"]
        program = Path(sys.executable).with_name("llama-server")
        running = contextlib.ExitStack()
        atexit.register(running.close)
        room = {"slots": 1} | {name: job[name] for name in ("rows", "threads", "drafts", "head")}
        self.url = running.enter_context(started(program, job["path"], **room))

    def complete(self, prompt: list[int], count: int) -> dict[str, Any]:
        """Return the server's times and counts for a greedy completion of `count` tokens."""
        body = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body | {"cache_prompt": False}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/completion", data, headers=headers)
        with DIRECT.open(asked, timeout=PATIENCE) as response:
            timings: dict[str, Any] = json.load(response)["timings"]
        return timings

    def prompt(self, tokens: list[int]) -> None:
        self.complete(tokens, 1)

    def decode(self, ask: Ask) -> Answer:
        timings = self.complete(tokens(ask["context"], self.vocabulary), 1 + ask["steps"])
        accepted = timings["draft_n_accepted"]
        steps = timings["predicted_n"] - 1 - accepted  # the first token comes with the prompt
        seconds = timings["predicted_ms"] / 1000 / steps
        return {"step_s": seconds, "drafts": timings["draft_n"], "accepted": accepted}


if __name__ == "__main__":
    serve(Server)
