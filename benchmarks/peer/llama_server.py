"""Starts llama.cpp's server, for `serving.py` and `llama_server_side.py`; stdlib only."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

PATIENCE = 600  # most seconds to load, or for an answer
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy


@contextlib.contextmanager
def started(
    program: Path,
    model: str | Path,
    *,
    slots: int,
    rows: int,
    threads: int,
    drafts: int = 0,
    head: str | None = None,
    flags: Sequence[str] = (),
) -> Iterator[str]:
    """Run the server on a free port until the block ends; yield its URL once it has loaded.

    rows: tokens of all slots together. drafts: drafts per step of the file's MTP module, or of the
    file `head`; 0 runs none. flags: others.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "--model", str(model), "--port", str(port), "-np", str(slots)]
    command += ["--ctx-size", str(rows), "--threads", str(threads)]
    if drafts:
        command += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(drafts)]
    if head:
        command += ["--model-draft", head]
    command += flags
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait(process, url)
            yield url
        finally:
            process.kill()


def wait(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the model is loaded."""
    for _ in range(10 * PATIENCE):
        with contextlib.suppress(urllib.error.URLError), DIRECT.open(f"{url}/health"):
            return
        if process.poll() is not None:
            sys.exit(f"llama-server ended with {process.returncode}")
        time.sleep(0.1)
    sys.exit(f"llama-server did not load within {PATIENCE} s")
