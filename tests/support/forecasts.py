"""Count the weights of a model once for all forecasts of a test file."""

import contextlib
from collections.abc import Iterator
from functools import cache

import pytest

from mtpbuild.builder.forecast import forecast


@contextlib.contextmanager
def counted_once() -> Iterator[None]:
    """Keep what forecasts count, by model and ranks: R1 has 46,000 weights."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("find_layout", "count_gpu_classes"):
            patch.setattr(forecast, name, cache(getattr(forecast, name)))
        yield
