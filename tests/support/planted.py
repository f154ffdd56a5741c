"""Plants bugs: calls of a function or method go to a wrong one, which is given the real one."""

from collections.abc import Callable
from typing import Any

import pytest


def wrap(patch: pytest.MonkeyPatch, owner: object, name: str, wrong: Callable[..., Any]) -> None:
    """Lets calls of `owner.name` go to `wrong(real, *arguments)`."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *given, **options: wrong(real, *given, **options))
