"""Shared code of the benchmarks: one line for a user's error, and starting servers."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from mtpbuild.runtime import MtpbuildError


def run(main: Callable[[], None]) -> None:
    """Run `main`; on an error print the message without a traceback, and exit with code 1."""
    try:
        main()
    except MtpbuildError as error:
        sys.exit(f"error: {error}")


@contextlib.contextmanager
def served(engine: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start `mtpbuild serve` on a free port; yield its address and its process.

    The server's log is read and dropped, so that the server never waits for a reader.
    """
    command = [sys.executable, "-m", "mtpbuild", "serve", "--engine", str(engine), "--port", "0"]
    command += ["--no-access-log", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = ""
        for line in process.stderr:
            if line.startswith("serving"):
                break
        else:
            sys.exit(line or "the server said nothing")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield line.split()[-1], process
        finally:
            process.terminate()
            if code := process.wait(60):
                sys.exit(f"the server ended with {code}")
