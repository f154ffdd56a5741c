"""The build backend: setuptools', which compiles the library of CPU kernels by any C++ compiler.

Where there is none, the backend asks for a wheel that contains one.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (hooks that stay as they are)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

SOURCE = Path(__file__).parents[1] / "plugins/cpu/source"
ZIGLANG = "ziglang==0.17.*"
ZIG = (sys.executable, "-m", "ziglang", "c++")
# Platforms of the wheels that `make dist-all` compiles on one machine, and zig's names for them.
PLATFORMS = {
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
    "macosx_14_0_arm64": "aarch64-macos.14.0",
    "win_amd64": "x86_64-windows-gnu",
}
SUFFIXES = {"macosx": ".dylib", "win": ".dll"}
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
# With AVX-512, GCC warns about one of its own headers (GCC bug 105593).
QUIET = ["-Wno-unknown-warning-option", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
X86 = {
    "avx2.cpp": ["-O3", "-mavx2", "-mfma", "-mf16c"],
    "avxvnni.cpp": ["-O3", "-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "avx512.cpp": ["-O3", "-march=x86-64-v4", "-mavx512vnni", *QUIET],
}
ARM = {"neon.cpp": ["-O3", "-march=armv8.2-a+dotprod"]}
FLAGS = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}
ZIG_SPELLING = {
    "-march=x86-64-v4": "-mcpu=x86_64_v4",
    "-march=armv8.2-a+dotprod": "-mcpu=generic+v8_2a+dotprod",
}


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler: $CXX, one in PATH or zig's; [] if there is none."""
    if asked := os.environ.get("CXX"):
        return shlex.split(asked)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    return list(ZIG) if find_spec("ziglang") else []


def compiler_for(platform: str) -> tuple[list[str], str]:
    """Return the command that compiles for one of PLATFORMS, and the kind of its processors."""
    target = PLATFORMS[platform]
    return [*ZIG, "-target", target], target.partition("-")[0]


def library_name(platform: str) -> str:
    """Return the name that runtime/cpu_library.py looks for on this platform."""
    return "libmtpbuild_cpu" + SUFFIXES.get(platform.replace("-", "_").partition("_")[0], ".so")


def list_files(source: Path, machine: str) -> dict[str, list[str]]:
    """Return the flags of each file to compile: for all machines, then by instruction set."""
    names = [*sorted(path.name for path in source.glob("*ops.cpp")), "plain.cpp"]
    return {name: ["-O2"] for name in names} | FLAGS.get(machine, {})


def compile_library(
    library: Path,
    compiler: Sequence[str],
    *,
    source: Path = SOURCE,
    machine: str | None = None,
    flags: tuple[str, ...] = (),
) -> None:
    """Compile each file for its own instruction set, into one library, which needs no Python."""
    zig = not {"zig", "ziglang"}.isdisjoint(Path(word).name for word in compiler)
    # Otherwise zig compiles for this machine's processor, and may add traps.
    common = [*compiler, *(["-mcpu=baseline", "-fno-sanitize=undefined", "-s"] if zig else [])]
    objects = []
    for name, own in list_files(source, machine or platform.machine()).items():
        objects.append(str(library.with_name(f"{name}.o")))
        if zig:
            own = [ZIG_SPELLING.get(flag, flag) for flag in own]
        file = ["-c", str(source / name), "-o", objects[-1]]
        subprocess.run([*common, *COMMON, *own, *flags, *file], check=True)
    # zig's start files don't run a library's destructors when it is unloaded: the process's end
    # would call them where they no longer are. So the library stays.
    stay = ["-Wl,-z,nodelete"] if zig and library.suffix == ".so" else []
    linked = [*common, "-shared", *stay, *flags, *objects, "-o", str(library)]
    subprocess.run(linked, check=True)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    elsewhere = "--plat-name" in str(config_settings)
    needed = [ZIGLANG] if elsewhere or not find_compiler() else []
    return [*build_meta.get_requires_for_build_wheel(config_settings), *needed]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return get_requires_for_build_wheel()
