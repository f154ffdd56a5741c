"""Finds the packages, and builds the library of CPU kernels; pyproject.toml says all the rest."""

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).absolute().parent / "tools"))
from compile_kernels import compile_library, find_compiler

FILES = [Path("tools/compile_kernels.py"), *sorted(Path("plugins/cpu/source").glob("*.[ch]*"))]


class BuildLibrary(build_ext):
    """Compiles the library, or fails in a line."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], "libmtpbuild_cpu.so"))

    def build_extension(self, ext: Extension) -> None:
        if not (compiler := find_compiler()):
            raise CompileError("there is no C++ compiler: install g++, or ziglang with pip")
        temporary = Path(self.build_temp)
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            compile_library(temporary / "library.so", compiler)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"the CPU kernels cannot be compiled: {error}") from None
        place = Path(self.get_ext_fullpath(ext.name))
        place.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(temporary / "library.so"), str(place))


code = {
    path.parent for top in ("builder", "plugins", "runtime") for path in Path(top).rglob("*.py")
}
data = {path for path in Path("recipes").iterdir() if path.is_dir() and path.name != "__pycache__"}
folders = (".".join(folder.parts) for folder in sorted({Path("recipes"), *code, *data}))
library = Extension("mtpbuild.runtime.cpu_library", sources=[], depends=list(map(str, FILES)))
setup(
    packages=["mtpbuild", *(f"mtpbuild.{folder}" for folder in folders)],
    ext_modules=[library],
    cmdclass={"build_ext": BuildLibrary},
)
