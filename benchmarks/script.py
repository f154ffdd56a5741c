"""Shared code of the benchmarks: errors in one line, GGUF files, commands."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mtpbuild.runtime import MtpbuildError
from mtpbuild.runtime.errors import UsageError

PEERS = Path(".venv-peers/bin")  # tools/peers_env.sh makes it


def run(main: Callable[[], None]) -> None:
    """Run `main`; on an error print the message without a traceback, and exit with code 1."""
    try:
        main()
    except MtpbuildError as error:
        sys.exit(f"error: {error}")


def convert(checkpoint: Path, out: Path, kind: str, *flags: str) -> str:
    """Write a checkpoint as GGUF, in `kind`; return the bytes of its tensors, as JSON."""
    script = Path(__file__).parent / "peer" / "gguf_file.py"
    command = [sys.executable, script, checkpoint, out, "--type", kind, *flags]
    return run_command([*map(str, command)])


def run_command(command: list[str]) -> str:
    """Return a command's standard output; raise UsageError with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else "no message"
        raise UsageError(f"{' '.join(command[:4])} ended with {done.returncode}: {last}")
    return done.stdout
