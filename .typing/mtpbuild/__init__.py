"""The package's version; `builder`, `plugins`, `recipes` and `runtime` are what it is made of."""

from pkgutil import extend_path
from typing import Any

# In a clone this folder has none of them: it must not hide those that are installed.
__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
