"""The number of CPU threads: the user's choice, or one for each physical core."""

import math
import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from mtpbuild.runtime.flag_groups import engine_flag
from mtpbuild.runtime.limits import SYSTEM, list_usable_processors, measure_limits, read_or_empty

AUTO = "auto"
VARIABLE = "OMP_NUM_THREADS"  # obeyed by programs that use several threads
P = ParamSpec("P")
R = TypeVar("R")
_stack_size = threading.Lock()  # of threading.stack_size, which is global


def make_threads_flag() -> int | None:
    """Return the default value of a field that is the flag `--threads`."""
    text = "CPU threads, or auto, the default: one for each physical core."
    return engine_flag(None, text, parser=parse_threads)


def parse_threads(text: str) -> int | None:
    """Read the value of `--threads`; None for `auto`. Raise ValueError for anything else."""
    if text == AUTO:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected a number or {AUTO}, got {text!r}") from None


def choose_default_threads() -> int:
    """Return the default number of threads: one for each physical core.

    OMP_NUM_THREADS, which users set to leave cores to others, is an upper limit.
    """
    text = os.environ.get(VARIABLE, "")
    limit = int(text) if text.isdecimal() and int(text) else math.inf
    return int(min(count_physical_cores(), limit))


def count_physical_cores(root: Path = SYSTEM, usable: Collection[int] | None = None) -> int:
    """Count the physical cores of the processors that this process may use.

    Two threads on one core share its arithmetic units and caches, so a second one makes a step no
    faster. A container's quota of processor time is a limit too. root and usable: as for
    `measure_limits`.
    """
    cores = {_read_siblings(root, cpu) for cpu in list_usable_processors(usable)}
    return min(len(cores), measure_limits(root, usable).processors)


def _read_siblings(root: Path, cpu: int) -> str:
    """Return an id of a processor's core: the processors on it, or its own number if unknown."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return read_or_empty(topology / "thread_siblings_list").strip() or str(cpu)


def start_daemon(call: Callable[[], R]) -> Future[R]:
    """Call a function in a daemon thread, which does not keep the process alive."""
    future = Future[R]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def call_with_stack(size: int, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in a thread with a stack of `size` bytes, for code that recurses deeply."""
    with _stack_size:
        before = threading.stack_size(size)
        try:
            future = start_daemon(partial(call, *args, **kwargs))
        finally:
            threading.stack_size(before)
    return future.result()
