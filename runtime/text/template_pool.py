"""The processes that render chat templates, started on demand and reused."""

import atexit
import marshal
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.text import template_process
from mtpbuild.runtime.text.template_process import MEMORY, SECONDS, Answer

MAX_PROCESSES = 4  # so that a slow rendering, of up to 2 s, delays few others


class TemplateProcess:
    """A process that renders templates until one of them exceeds a limit."""

    def __init__(self) -> None:
        from subprocess import DEVNULL, PIPE, Popen  # takes 10 ms; only chats need it

        names = (find_spec(name) for name in ("jinja2", "markupsafe"))
        folders = {str(Path(spec.origin).parents[1]) for spec in names if spec and spec.origin}
        # The process imports from these folders alone and gets no Ctrl-C from the terminal.
        command = [sys.executable, "-I", "-S", template_process.__file__, *sorted(folders)]
        try:
            self._process: Popen[bytes] = Popen(
                command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise EngineError(f"no process for the chat template ({error.strerror})") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def answer(self, request: bytes) -> Answer:
        """Return the rendered text of a request, or the limit that was exceeded."""
        with suppress(BrokenPipeError):  # it has ended; its exit code says why
            template_process.write_block(self._requests, request)
            if answer := template_process.read_block(self._answers):
                return answer[0], answer[1:].decode("utf-8", "surrogatepass")
        code = self._process.wait()
        reasons = {
            -getattr(signal, "SIGALRM", 0): f"it takes more than {SECONDS:g} seconds",
            template_process.OUT_OF_MEMORY: f"it takes more than {MEMORY >> 20} MB of memory",
        }
        reason = reasons.get(code, f"its process ended (exit code {code})")
        return template_process.LIMIT, reason

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        with suppress(BrokenPipeError):  # unread input
            self._requests.close()


class TemplatePool:
    """Up to MAX_PROCESSES processes, each of which renders one prompt at a time."""

    def __init__(self) -> None:
        self._idle: list[TemplateProcess] = []
        self._turns = threading.BoundedSemaphore(MAX_PROCESSES)

    def answer(self, request: bytes) -> Answer:
        with self._turns:
            process = self._take()
            try:
                kind, text = process.answer(request)
            except BaseException:  # after Ctrl-C another request would read its answer
                process.end()
                raise
            if process.is_alive:
                self._idle.append(process)
            else:
                process.end()
        return kind, text

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def _take(self) -> TemplateProcess:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            process.end()
        return TemplateProcess()


_pool = TemplatePool()


def render_text(source: str, variables: dict[str, Any]) -> Answer:
    """Render a template; return the kind of the answer, and its text or the reason."""
    return _pool.answer(marshal.dumps((source, variables)))


def _start_anew() -> None:
    """Leave the processes to the parent after a fork."""
    global _pool
    _pool = TemplatePool()


atexit.register(lambda: _pool.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
