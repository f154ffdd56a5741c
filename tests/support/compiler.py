"""Skips what needs a C++ compiler on a machine that has none (`tests/test_without_compiler.py`)."""

import os
import shutil

import pytest

# What torch asks for; target inductor compiles programs with it.
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
NONE = "there is no C++ compiler"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason=NONE)
