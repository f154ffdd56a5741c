"""The shared library of CPU kernels for onnxruntime, and the engines that need it.

The installation compiles it from plugins/cpu/source.
"""

import logging
import platform
import sys
from functools import cache
from pathlib import Path

from mtpbuild.runtime.errors import EngineError, MissingDependencyError

FILE = "libmtpbuild_cpu" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
# The layout of packed weights (docs/cpu-kernels.md), and the version of the operators, which grows
# when an operator is added or its operands change. A manifest has the LAYOUT of its build.
LAYOUT = "panels32.13"
ISAS = ("plain", "avx2", "avxvnni", "avx512", "neon")  # instruction sets with their own kernels
ISA_VARIABLE = "MTPBUILD_CPU_ISA"  # selects one of them; by default the machine's best
DOMAIN = "mtpbuild"  # of the library's operators
REMEDY = "install mtpbuild again with pip"
log = logging.getLogger(__name__)


def find_library() -> Path | None:
    """Return the library's file; None if it is missing."""
    path = Path(__file__).with_name(FILE)
    return path if path.is_file() else None


def find_library_for(layout: str, engine: Path) -> Path:
    """Return the library for an engine whose weights are packed in this layout.

    The first call says whether the library was never tried on this system. Raises EngineError for
    another layout than this version's, and MissingDependencyError if the library is missing.
    """
    if layout != LAYOUT:
        raise EngineError(
            f"{engine}: its weights and operators are {layout}, this mtpbuild runs "
            f"{LAYOUT}; build it again, or upgrade mtpbuild if a newer one built it"
        )
    if (path := find_library()) is None:
        raise MissingDependencyError(
            f"{engine}: needs the library of CPU kernels, which is not built here: {REMEDY}"
        )
    _say_where_untried()
    return path


@cache
def _say_where_untried() -> None:
    system = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    if system != "Linux":
        tried = f"have never run on {system}"
    elif platform.machine() == "aarch64":
        tried = "have run on an emulated ARM processor alone"
    else:
        return
    log.warning("mtpbuild's CPU kernels %s; `mtpbuild verify` checks an engine", tried)
