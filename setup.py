"""Finds the packages, and builds the library of CPU kernels; pyproject.toml says all the rest.

`bdist_wheel --plat-name` names another platform to compile for (docs/testing.md).
"""

import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).absolute().parent / "tools"))
from compile_kernels import (
    PLATFORMS,
    compile_library,
    compiler_for,
    find_compiler,
    library_name,
)

FILES = [Path("tools/compile_kernels.py"), *sorted(Path("plugins/cpu/source").glob("*.[ch]*"))]


class BuildLibrary(build_ext):
    """Compiles the library, or fails in a line."""

    def asked(self) -> str | None:
        """Return the platform that the command of the wheel names, if it does."""
        wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
        return wheel.plat_name if wheel is not None and wheel.plat_name_supplied else None

    def get_ext_filename(self, fullname: str) -> str:
        name = library_name(self.asked() or sysconfig.get_platform())
        return str(Path(*fullname.split(".")[:-1], name))

    def build_extension(self, ext: Extension) -> None:
        compiler, machine = find_compiler(), platform.machine()
        if asked := self.asked():
            if asked not in PLATFORMS:
                raise CompileError(f"--plat-name {asked} is none of {', '.join(PLATFORMS)}")
            compiler, machine = compiler_for(asked)
        if not compiler:
            raise CompileError("there is no C++ compiler: install g++, or ziglang with pip")
        temporary = Path(self.build_temp)
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            compile_library(temporary / "library.so", compiler, machine=machine)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"the CPU kernels cannot be compiled: {error}") from None
        place = Path(self.get_ext_fullpath(ext.name))
        place.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(temporary / "library.so"), str(place))


class AnyPython(bdist_wheel):
    """Names the wheel: it is for a platform and any Python 3, as the library links none."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


CODE = ("builder", "lab", "plugins", "runtime")
code = {path.parent for top in CODE for path in Path(top).rglob("*.py")}
data = {path for path in Path("recipes").iterdir() if path.is_dir() and path.name != "__pycache__"}
folders = (".".join(folder.parts) for folder in sorted({Path("recipes"), *code, *data}))
library = Extension("mtpbuild.runtime.cpu_library", sources=[], depends=list(map(str, FILES)))
setup(
    packages=["mtpbuild", *(f"mtpbuild.{folder}" for folder in folders)],
    ext_modules=[library],
    cmdclass={"bdist_wheel": AnyPython, "build_ext": BuildLibrary},
)
