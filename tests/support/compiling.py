"""Runs Python in a process in which Triton compiles, with its interpreter off."""

import os
import subprocess
import sys
from pathlib import Path


def run(*arguments: str, cache: Path, **others: str) -> str:
    """Return what Python prints in a process that compiles; others: of its environment."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TORCH_LOGS": "-all"} | others
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
