"""Plants bugs: calls of a function or method go to a wrong one, which is given the real one."""

from collections.abc import Callable
from typing import Any

import pytest

Patch = Callable[[pytest.MonkeyPatch], None]


def wrap(patch: pytest.MonkeyPatch, owner: object, name: str, wrong: Callable[..., Any]) -> None:
    """Let calls of `owner.name` go to `wrong(real, *arguments)`."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *given, **options: wrong(real, *given, **options))


def wrapped(owner: object, name: str, wrong: Callable[..., Any]) -> Patch:
    """Make the bug that `wrap` plants."""
    return lambda patch: wrap(patch, owner, name, wrong)


def replaced(owner: object, name: str, value: object) -> Patch:
    """Make a bug that puts something else in an attribute's place, even of a field."""
    return lambda patch: patch.setattr(owner, name, value, raising=False)
