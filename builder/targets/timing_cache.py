"""What TensorRT measured of its kernels, in a file: later builds measure only what is new."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


def place(version: str, capability: str) -> Path:
    """Below XDG_CACHE_HOME, by default ~/.cache: a file per TensorRT and kind of GPU."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mtpbuild" / f"tensorrt-{version}-sm{capability.replace('.', '')}.timing"


@contextlib.contextmanager
def timing_cache(trt: ModuleType, config: Any, capability: str) -> Iterator[None]:
    """Lets `config` know what earlier builds measured, and keeps what the build in here did.

    A file of another GPU, or a damaged one, is replaced. One that can't be read or written costs
    time and nothing else: a note says so.
    """
    path = place(trt.__version__, capability)
    with _noted(path):
        known = path.read_bytes() if path.exists() else b""
        cache = config.create_timing_cache(known)
        if cache is None or not config.set_timing_cache(cache, False):
            config.set_timing_cache(config.create_timing_cache(b""), False)
    yield
    with _noted(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")  # builds may run at the same time
        fresh.write_bytes(bytes(config.get_timing_cache().serialize()))
        fresh.replace(path)


@contextlib.contextmanager
def _noted(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        logging.getLogger(__name__).warning("note: no timing cache at %s (%s)", path, reason)
