"""Attributes of other packages that have another value for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any

MISSING = object()


@contextlib.contextmanager
def override_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module's or a class's attribute a value inside the block."""
    before = vars(owner).get(name, MISSING)  # unlike getattr, it keeps static methods unbound
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
