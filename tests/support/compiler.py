"""Skips what needs a C++ compiler on a machine that has none (`tests/test_without_compiler.py`)."""

import os
import shutil

import pytest

from mtpbuild.runtime.cpu_library import find_library

# What torch asks for; target inductor compiles programs with it.
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
NONE = "there is no C++ compiler"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason=NONE)
needs_library = pytest.mark.skipif(
    find_library() is None, reason="there was no C++ compiler to build it"
)
