"""An installation without a C++ compiler: ziglang's compiles the kernels, and they say the same."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from mtpbuild.runtime import cpu_library
from tests.support.compiler import NONE
from tests.support.cpu_kernels import load_backend

ROOT = Path(__file__).parents[1]
OPERATORS = [path.relative_to(ROOT) for path in (ROOT / "tests/plugins").glob("test_cpu_*.py")]
ENGINES = ["tests/builder/test_exact_engine.py", "tests/test_tiny.py", "tests/test_qwen_tiny.py"]
INDUCTOR = "tests/builder/test_inductor_engine.py"
BLOCKED = """
import runpy, sys
sys.modules["ziglang"] = None
sys.argv = ["setup.py", "--quiet", "build_ext"]
runpy.run_path("setup.py")
"""


def without_compilers(folder: Path) -> dict[str, str]:
    """Return the environment with PATH's programs but for compilers."""
    folder.mkdir(exist_ok=True)
    for place in os.environ["PATH"].split(":"):
        for program in Path(place).glob("*"):
            compiles = re.search(r"\+\+|gcc|clang|^cc$|^c\d\d|^zig$", program.name)
            if not compiles and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "OMP_", "PYTHON"))}
    return {k: v for k, v in own.items() if k not in ("CC", "CXX")} | {"PATH": str(folder)}


def test_what_the_build_requires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is there is used; only where there is none is ziglang asked for."""
    backend = load_backend()
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable)
    assert [each() for each in asked] == [[backend.ZIGLANG]] * 2
    for name in ("clang++", "g++", "c++"):
        (tmp_path / name).touch(0o755)
        assert backend.find_compiler() == [name]
    monkeypatch.setenv("CXX", "ccache my-c++")
    assert backend.find_compiler() == ["ccache", "my-c++"]
    assert [each() for each in asked] == [[], []]
    elsewhere = {"--build-option": "--plat-name=win_amd64"}
    assert backend.get_requires_for_build_wheel(elsewhere) == [backend.ZIGLANG]


def test_the_platforms_of_wheels() -> None:
    """The Makefile lists them; a library has the name that the run time looks for."""
    backend = load_backend()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [listed] = re.findall(r"(?m)^PLATFORMS = (.*)", makefile)
    assert backend.ZIGLANG in makefile
    assert listed.split() == [*backend.PLATFORMS]
    names = {name: backend.library_name(name).partition(".")[2] for name in backend.PLATFORMS}
    assert [*names.values()] == ["so", "so", "dylib", "dll"]
    machines = [backend.compiler_for(name)[1] for name in backend.PLATFORMS]
    assert all(machine in backend.FLAGS for machine in machines)
    assert backend.library_name(sysconfig.get_platform()) == cpu_library.FILE


@pytest.mark.parametrize(
    ("own", "error"),
    [({}, "error: there is no C++ compiler: install g++, or ziglang with pip"),
     ({"CXX": "no-such"}, "error: the CPU kernels cannot be compiled: [Errno 2] No such file ")],
)  # fmt: skip
def test_no_compiler_at_all(own: dict[str, str], error: str, tmp_path: Path) -> None:
    """The installation fails in a line."""
    environment = without_compilers(tmp_path / "bin") | own
    (source := tmp_path / "source").mkdir()  # setuptools writes build/
    for path in ROOT.glob("[!.]*"):
        (source / path.name).symlink_to(path)
    command = [sys.executable, "-W", "ignore", "-c", BLOCKED]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(error)
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository that was installed where no compiler is, in its own .venv."""
    if find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install ziglang")
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
    others = [place for place in sys.path if place.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others), encoding="utf-8")
    flags = ["--no-deps", "--no-index", "--no-build-isolation", "--editable", "."]
    run_in(copy, "-m", "pip", "install", "--quiet", *flags)
    assert (copy / "runtime" / cpu_library.FILE).exists()
    return copy


def run_in(copy: Path, *arguments: str | Path) -> str:
    """Run the copy's Python without a compiler, and return what it printed."""
    environment = without_compilers(copy.with_name("bin"))
    command = [copy / ".venv/bin/python", *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.full
def test_the_example_without_a_compiler(installed: Path) -> None:
    run_in(installed, "-m", "mtpbuild", "build", "--model", "deepseek-tiny", "--nextn", "3")
    engine = ["--engine", "engines/tiny_n3"]
    shown = run_in(installed, "-m", "mtpbuild", "run", *engine, "--chat", "What is 47 + 85?")
    assert "132" in shown
    shown = run_in(installed, "-m", "mtpbuild", "inspect", "--json", *engine[1:])
    assert f'"cpu_layout": "{cpu_library.LAYOUT}"' in shown


@pytest.mark.full
def test_operators_and_engines_without_a_compiler(installed: Path) -> None:
    """What the kernels say; programs of `inductor` need a compiler and say so."""
    suite = ["-m", "pytest", "-rs", "-n", "2", "--dist", "loadgroup", "-m", "not full"]
    shown = run_in(installed, *suite, *OPERATORS, *ENGINES, INDUCTOR)
    assert " passed" in shown
    assert NONE in shown
