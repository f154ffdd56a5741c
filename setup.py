"""Builds the library of CPU kernels beside the Python packages; pyproject.toml says all the rest.

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


library = Extension(
    "mtpbuild.runtime.cpu_library",
    sources=[str(SOURCE / name) for name in FLAGS],
    depends=sorted(map(str, SOURCE.glob("*.h"))),
    optional=True,
)
setup(ext_modules=[library], cmdclass={"build_ext": BuildLibrary})
