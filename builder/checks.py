"""Checks of flags and installed packages that several commands share."""

import contextlib
from collections.abc import Collection, Iterator

from mtpbuild.runtime.errors import MissingDependencyError, UsageError, advise_install


def in_range(least: int, value: int, most: int, flag: str) -> int:
    """Return the value; raise UsageError, which names the flag, if it is out of range."""
    if not least <= value <= most:
        raise UsageError(f"{flag} {value} is outside {least}..{most}")
    return value


def check_one_of(value: str, choices: Collection[str], flag: str) -> str:
    """Return the value; raise UsageError, which names the flag, if it is none of the choices."""
    if value not in choices:
        raise UsageError(f"{flag} {value} is unknown; supported: {', '.join(choices)}")
    return value


@contextlib.contextmanager
def needs(group: str, *modules: str) -> Iterator[None]:
    """Turn a failed import of one of `modules` into one line that names the group to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in modules:
            raise
        raise MissingDependencyError(f"this needs {error.name}: {advise_install(group)}") from None
