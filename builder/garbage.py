"""Python's garbage collector, out of the way."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """What becomes garbage waits for the end, and is collected there.

    Meanwhile no object gets older, so looking through the youngest ones finds all of it, and costs
    nothing for the many that lived before.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(0)
