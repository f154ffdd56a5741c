"""Finds the packages, and builds the library of CPU kernels; pyproject.toml says all the rest.

Without a C++ compiler the installation goes on without it.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path("plugins/cpu/source")
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
FLAGS = {path.name: ["-O2"] for path in sorted(SOURCE.glob("*ops.cpp"))} | {"plain.cpp": ["-O2"]}
if platform.machine() in ("x86_64", "AMD64"):
    # GCC's header warns of itself with AVX-512: its bug 105593.
    quiet = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    FLAGS["avx2.cpp"] = ["-O3", "-mavx2", "-mfma", "-mf16c"]
    FLAGS["avxvnni.cpp"] = ["-O3", "-mavx2", "-mfma", "-mf16c", "-mavxvnni"]
    FLAGS["avx512.cpp"] = ["-O3", "-march=x86-64-v4", "-mavx512vnni", *quiet]
elif platform.machine() in ("aarch64", "arm64"):
    FLAGS["neon.cpp"] = ["-O3", "-march=armv8.2-a+dotprod"]


class BuildLibrary(build_ext):
    """Compiles each file for its own instruction set, into a library that knows no Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], "libmtpbuild_cpu.so"))

    def build_extension(self, ext: Extension) -> None:
        objects = []
        for name, flags in FLAGS.items():
            objects += self.compiler.compile(
                [str(SOURCE / name)], output_dir=self.build_temp, extra_postargs=[*COMMON, *flags]
            )
        path = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(objects, path, target_lang="c++")


code = {
    path.parent for top in ("builder", "plugins", "runtime") for path in Path(top).rglob("*.py")
}
data = {path for path in Path("recipes").iterdir() if path.is_dir() and path.name != "__pycache__"}
folders = (".".join(folder.parts) for folder in sorted({Path("recipes"), *code, *data}))
library = Extension(
    "mtpbuild.runtime.cpu_library",
    sources=[str(SOURCE / name) for name in FLAGS],
    depends=sorted(map(str, SOURCE.glob("*.h"))),
    optional=True,
)
setup(
    packages=["mtpbuild", *(f"mtpbuild.{folder}" for folder in folders)],
    ext_modules=[library],
    cmdclass={"build_ext": BuildLibrary},
)
