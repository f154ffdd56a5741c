"""Programs in other languages, examples/other: they generate what Python does.

tools/other_languages.sh fetches what they need.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.cpu_library import find_library
from tests.support.scripts import ROOT

pytestmark = pytest.mark.xdist_group("tiny")
EXAMPLES = ROOT / "examples/other"
ORT = EXAMPLES / "onnxruntime"
PROMPT = '''def add(first, second):
    """Add two numbers."""
    return first + second


def fibonacci(n):'''
Command = list[str | Path]


def needs(tool: str, file: Path) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    if not file.exists():
        pytest.skip(f"{file.relative_to(ROOT)} is missing: tools/other_languages.sh fetches it")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return examples/other/generate.c, compiled."""
    needs("cc", ORT / "include/onnxruntime_c_api.h")
    path, library = tmp_path_factory.mktemp("c") / "generate", ORT / "lib"
    flags: Command = ["-O1", "-std=c11", "-Wall", "-Wextra", "-Werror", "-I", ORT / "include"]
    link: Command = ["-L", library, "-lonnxruntime", f"-Wl,-rpath,{library}", "-o", path]
    subprocess.run(["cc", *flags, EXAMPLES / "generate.c", *link], check=True)
    return path


def generated(command: Command, tokens: list[int], count: int = 48) -> tuple[list[int], int]:
    """Run a program; return the tokens that it printed, and its number of steps."""
    run = [*command, str(count), *map(str, tokens)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    output, steps = done.stderr.split(" tokens in ")
    assert int(output) == len(done.stdout.split())
    return [int(word) for word in done.stdout.split()], int(steps.removesuffix(" steps\n"))


def check_equal(folder: Path, command: Command) -> None:
    """Check 48 tokens after a prompt of two chunks or more, and a text that ends by itself."""
    with Engine.load(folder, threads=1) as engine:
        long = engine.encode(PROMPT)
        result = engine.generate(long, SamplingParams(max_tokens=48))
        assert len(result.token_ids) == 48
        tokens, steps = generated(command, long)
        assert tokens == result.token_ids
        assert steps == result.metrics.speculative_decoding.num_spec_steps < 30
        short = engine.encode("2")
        ended = engine.generate(long[:1] + short, SamplingParams(max_tokens=200))
        assert generated(command, long[:1] + short, 200)[0] == ended.token_ids


def test_c(program: Path, tiny_engine: Callable[..., Path]) -> None:
    library = find_library()
    assert library is not None
    folder = tiny_engine(3)
    check_equal(folder, [program, folder, library])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "-", "4", "5"], "error: nowhere/engine.json: No such file or directory\n"),
        (["nowhere", "lib.so", "4", "5"], "error: onnxruntime: Failed to load library lib.so "),
        (["nowhere"], "error: usage: generate ENGINE LIBRARY COUNT TOKEN...\n"),
    ],
)
def test_c_refuses(program: Path, arguments: list[str], says: str) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1


def test_node_needs_standard_operators(tiny_engine: Callable[..., Path]) -> None:
    needs("node", EXAMPLES / "node_modules/onnxruntime-node")
    run: Command = ["node", EXAMPLES / "generate.mjs", tiny_engine(3), "4", "5"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(": its operators are mtpbuild's; build it with --portable\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.full
def test_node(tiny_engine: Callable[..., Path]) -> None:
    needs("node", EXAMPLES / "node_modules/onnxruntime-node")
    folder = tiny_engine(3, portable=True)
    check_equal(folder, ["node", EXAMPLES / "generate.mjs", folder])
