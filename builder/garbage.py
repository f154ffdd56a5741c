"""Python's garbage collector, out of the way."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """What is garbage now is collected first; what becomes garbage waits for the end."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
