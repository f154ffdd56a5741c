"""A process that answers lines of JSON: a peer of `peers.py`, or a side of `one_machine.py`."""

import contextlib
import json
import os
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

Answer = dict[str, Any]
GRACE = 30  # most seconds to end by itself


class PeerProcess:
    """A peer's process, which answers one question at a time.

    ready: its first answer, given once it has loaded. patience: the most seconds for an answer.
    error: why the process ended or failed, "" if it did neither; answers are then None.
    """

    def __init__(self, command: Sequence[str], threads: int, patience: int) -> None:
        self.error, self.patience = "", patience
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        self.last_lines = deque(["no message"], maxlen=20)  # of standard error
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()
        self.ready = self._read()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.last_lines.extend(line.strip() for line in self.process.stderr if line.strip())

    def ask(self, **question: Any) -> Answer | None:
        if self.error:
            return None
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # the next read reports the cause
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        return self._read()

    def _read(self) -> Answer | None:
        assert self.process.stdout is not None
        watchdog = threading.Timer(self.patience, self.process.kill)
        watchdog.start()
        text = self.process.stdout.readline()
        watchdog.cancel()
        if not text:
            code = self.process.wait()
            self.listener.join()
            self.error = f"ended with {code}: {self.last_lines[-1]}"
            return None
        answer: Answer = json.loads(text)
        self.error = answer.get("error", "")
        return None if self.error else answer

    def close(self) -> None:
        """End the process: it ends when its input does, or is killed after some seconds."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        self.process.kill()
        self.listener.join()
        with self.process:
            pass  # closes the pipes
