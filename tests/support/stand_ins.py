"""Replaces a part of the machine while a block runs: packages, functions that fail."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest


@contextlib.contextmanager
def importing(modules: Mapping[str, object]) -> Iterator[None]:
    """Let imports find these modules, whatever is installed; None is a missing module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield


@contextlib.contextmanager
def failing(owner: object, name: str, error: BaseException) -> Iterator[None]:
    """Let every call of a function, through this module or object, raise the error."""

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield
