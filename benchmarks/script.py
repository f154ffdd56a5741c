"""Lets a benchmark end with one line on a user's mistake, as `mtpbuild` does."""

import sys
from collections.abc import Callable

from mtpbuild.runtime import MtpbuildError


def run(main: Callable[[], None]) -> None:
    """Runs `main`; on an error it prints the message without a traceback, with exit code 1."""
    try:
        main()
    except MtpbuildError as error:
        sys.exit(f"error: {error}")
