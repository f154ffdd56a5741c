"""Checks that several commands make of what they were given."""

import contextlib
from collections.abc import Iterator

from mtpbuild.runtime.errors import MissingDependencyError, UsageError


def in_range(least: int, value: int, most: int, flag: str) -> int:
    """The value itself; raises UsageError that names the flag if it is outside."""
    if not least <= value <= most:
        raise UsageError(f"{flag} {value} is outside {least}..{most}")
    return value


@contextlib.contextmanager
def needs(group: str, *modules: str) -> Iterator[None]:
    """Turn a missing package of a dependency group into one line that names the group."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in modules:
            raise
        raise MissingDependencyError(
            f"building needs {error.name}: pip install 'mtpbuild[{group}]'"
        ) from None
