"""Count the weights of a model once for all forecasts of a test file."""

import contextlib
from collections.abc import Iterator
from functools import cache

import pytest

from mtpbuild.lab.forecast import cpu, forecast


@contextlib.contextmanager
def counted_once() -> Iterator[None]:
    """Keep what forecasts count, by model and ranks: R1 has 46,000 weights."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (forecast, "find_layout"),
            (forecast, "count_gpu_classes"),
            (cpu, "count_classes"),
        ):
            patch.setattr(module, name, cache(getattr(module, name)))
        yield
