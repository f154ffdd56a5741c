"""An installation without a C++ compiler: the example runs, and so does the suite."""

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from mtpbuild.runtime import cpu_library

ROOT = Path(__file__).parents[1]
MISSING = "no-such-compiler"
SUITE = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-m", "not full"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository that was installed where no compiler is, in its own .venv."""
    copy = tmp_path_factory.mktemp("without") / "mtpbuild"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    subprocess.run(["git", "add", "--all"], cwd=copy, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=copy, check=True)
    (packages,) = copy.glob(".venv/lib/python*/site-packages")
    # Everything else is this environment's; its own link to mtpbuild is not followed.
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    flags = ["--no-deps", "--no-index", "--no-build-isolation", "--editable", "."]
    ran(copy, "-m", "pip", "install", "--quiet", *flags)
    assert not (copy / "runtime" / cpu_library.FILE).exists()
    return copy


def ran(copy: Path, *arguments: str) -> str:
    """Runs the copy's Python without a compiler, and returns what it printed."""
    hidden = {"CC": MISSING, "CXX": MISSING}
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "OMP_", "PYTHON"))}
    done = subprocess.run(
        [str(copy / ".venv/bin/python"), *arguments],
        cwd=copy,
        env=own | hidden,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.full
def test_the_example_without_a_compiler(installed: Path) -> None:
    ran(installed, "-m", "mtpbuild", "build", "--model", "deepseek-tiny", "--nextn", "3")
    engine = ["--engine", "engines/tiny_n3"]
    assert "132" in ran(installed, "-m", "mtpbuild", "run", *engine, "--chat", "What is 47 + 85?")
    shown = ran(installed, "-m", "mtpbuild", "inspect", "--json", *engine[1:])
    assert '"cpu_layout": null' in shown


@pytest.mark.full
def test_the_suite_without_a_compiler(installed: Path) -> None:
    """It takes as long as `make test`."""
    assert " passed" in ran(installed, *SUITE)
