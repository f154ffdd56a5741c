"""How the benchmarks end on a user's mistake: with one line, as `mtpbuild` does."""

import sys
from collections.abc import Callable

from mtpbuild.runtime import MtpbuildError


def run(main: Callable[[], None]) -> None:
    """Exit code 1 and the error's message in place of a traceback."""
    try:
        main()
    except MtpbuildError as error:
        sys.exit(f"error: {error}")
