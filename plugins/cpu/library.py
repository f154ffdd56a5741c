"""Where the library of CPU kernels is, and what is missing if it is not there."""

from pathlib import Path

FILE = "libmtpbuild_cpu.so"
LAYOUT = "panels32"  # of packed weights: docs/cpu-kernels.md says how they lie
DOMAIN = "mtpbuild"  # of its operators
MISSING = "the library of CPU kernels is not built: install g++, then install mtpbuild again"


def find_library() -> Path | None:
    """Return the library's file; None if the installation had no C++ compiler."""
    path = Path(__file__).with_name(FILE)
    return path if path.is_file() else None
