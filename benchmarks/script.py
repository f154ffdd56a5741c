"""Shared code of the benchmarks: flags, errors in one line, prompts, timed programs, servers."""

import argparse
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mtpbuild.builder.plan.recipe import BUILT_IN
from mtpbuild.lab.measure.prompts import Dataset, load_groups
from mtpbuild.runtime import Engine, MtpbuildError
from mtpbuild.runtime.errors import UsageError

PEERS = Path(".venv-peers/bin")  # tools/peers_env.sh makes it


def run(main: Callable[[], None]) -> None:
    """Run `main`; on an error print the message without a traceback, and exit with code 1."""
    try:
        main()
    except MtpbuildError as error:
        sys.exit(f"error: {error}")


def parse_flags(description: str | None, *positional: str, **defaults: Any) -> argparse.Namespace:
    """Parse the command line: paths, then a flag for each default.

    A path's name in the plural takes several. False makes a switch, and None stands for a number.
    """
    style = argparse.RawDescriptionHelpFormatter  # as the docstring has it, line by line
    parser = argparse.ArgumentParser(description=description, formatter_class=style)
    for name in positional:
        parser.add_argument(name, type=Path, nargs="+" if name.endswith("s") else None)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            kind = int if default is None else type(default)
            parser.add_argument(flag, type=kind, default=default)
    return parser.parse_args()


def load_prompts(engine: Engine, kind: str, count: int, tokens: int) -> list[list[int]]:
    """Load the first prompts of a built-in set, which have room for `tokens` tokens of output."""
    groups = load_groups(Dataset(kind, count, output_len=tokens), engine, 1)
    return [prompt.token_ids for group in groups for prompt in group]


def load_both(engine: Engine, count: int, tokens: int) -> list[list[int]]:
    """Load the first `count` prompts of the two built-in sets, alternating."""
    sets = [load_prompts(engine, kind, count, tokens) for kind in BUILT_IN]
    return [prompt for each in zip(*sets, strict=True) for prompt in each][:count]


class TimedPrograms:
    """A wrapper of programs that records the beginning and end of their calls, in seconds."""

    def __init__(self, programs: Any) -> None:
        timed_already = isinstance(programs, TimedPrograms)
        self.programs: Any = programs.programs if timed_already else programs
        self.calls: dict[str, list[tuple[float, float]]] = {"prefill": [], "step": []}

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.programs, name)
        if name not in self.calls:
            return call

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments)
            self.calls[name].append((start, time.perf_counter()))
            return result

        return timed

    def seconds(self, name: str) -> list[float]:
        """Return the seconds of each call."""
        return [end - start for start, end in self.calls[name]]


def convert(checkpoint: Path, out: Path, kind: str, *flags: str) -> None:
    """Write a checkpoint as GGUF, in `kind`."""
    script = Path(__file__).parent / "peer" / "gguf_file.py"
    command = [sys.executable, script, checkpoint, out, "--type", kind, *flags]
    run_command([*map(str, command)])


def run_command(command: list[str]) -> str:
    """Return a command's standard output; raise UsageError with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else "no message"
        raise UsageError(f"{' '.join(command[:4])} ended with {done.returncode}: {last}")
    return done.stdout


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
