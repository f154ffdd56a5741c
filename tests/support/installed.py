"""Installs a package that has an entry point; runs the command where it is, and elsewhere."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RULES = {"typical": "tests.support.typical:TYPICAL", "thrifty": "tests.support.thrifty:THRIFTY"}


@contextlib.contextmanager
def installed(folder: Path, group: str, name: str, at: str) -> Iterator[Path]:
    """Put a folder on the path that says: entry point `name` of `group` is `at`."""
    (info := folder / f"{name}-1.0.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {at}\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@contextlib.contextmanager
def rules_installed(folder: Path) -> Iterator[Path]:
    """Put a folder on the path that has all of `RULES`."""
    with contextlib.ExitStack() as stack:
        for name, at in RULES.items():
            stack.enter_context(installed(folder, "mtpbuild.acceptance_rules", name, at))
        yield folder


def mtpbuild(*arguments: object, path: tuple[Path, ...] = ()) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own, with folders on its path."""
    return subprocess.run(
        [sys.executable, "-m", "mtpbuild", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )
