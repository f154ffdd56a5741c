"""What benchmarks share: they end with one line on a user's mistake, and start servers."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from mtpbuild.runtime import MtpbuildError


def run(main: Callable[[], None]) -> None:
    """Runs `main`; on an error it prints the message without a traceback, with exit code 1."""
    try:
        main()
    except MtpbuildError as error:
        sys.exit(f"error: {error}")


@contextlib.contextmanager
def served(engine: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Starts `mtpbuild serve` on a free port; yields its address and its process.

    What the server logs is read and dropped, so that it never waits for a reader.
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
