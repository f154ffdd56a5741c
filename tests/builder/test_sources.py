"""A fingerprint changes with the code that makes an engine, and with no other."""

import shutil
from pathlib import Path

import pytest

from mtpbuild.builder.compiler.fingerprint import PACKAGE, SOURCES, TREE, hash_of_code

CPU = ("builder.targets.onnxruntime",)
MODULES = (*CPU, "builder.models.deepseek_v3.config")


def hashed(tree: Path) -> str:
    return hash_of_code(*(f"{PACKAGE}.{name}" for name in MODULES), tree=tree)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("trees") / "tree"
    for folder in ("builder", "lab", "plugins", "runtime"):
        shutil.copytree(TREE / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


@pytest.fixture
def tree(copied: Path) -> Path:
    assert hashed(copied) == hashed(TREE), "an earlier test has left a change"
    return copied


def changes(tree: Path, file: str, before: str, after: str) -> bool:
    """Whether the hash changes with a text in a file."""
    path, old = tree / file, hashed(tree)
    text = path.read_text(encoding="utf-8")
    assert before in text, f"{file} is without {before!r}"
    try:
        path.write_text(text.replace(before, after, 1), encoding="utf-8")
        return hashed(tree) != old
    finally:
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("runtime/contract/controls.py", "MAX_BANNED = 16", "MAX_BANNED = 17"),
        ("runtime/contract/state.py", '"rows", "width")', '"rows", "size")'),
        ("plugins/mla_attention/triton.py", "OPEN_ROWS = 512", "OPEN_ROWS = 256"),
        ("builder/program/step.py", "new = updates.after(n)", "new = updates.after(n + 0)"),
    ],
)
def test_a_constant_or_an_operation_counts(tree: Path, file: str, before: str, after: str) -> None:
    assert changes(tree, file, before, after)


@pytest.mark.parametrize(
    "file",
    [
        "plugins/rope/onnx.py",
        "builder/targets/onnxruntime/lowering.py",
        "builder/models/deepseek_v3/model.py",
        "builder/models/common/layers.py",
        "builder/weights/quantised_view.py",
    ],
)
def test_code_that_makes_an_engine_counts(tree: Path, file: str) -> None:
    text = (tree / file).read_text(encoding="utf-8")
    assert changes(tree, file, text, text + "\nOTHER = 1\n")


@pytest.mark.parametrize(
    "file",
    [
        "lab/bench/bench.py",
        "builder/cli/build.py",
        "lab/verify/verify.py",
        "lab/forecast/step.py",
        "builder/targets/tensorrt/lowering.py",  # another target
        "runtime/engine/loop.py",
        "runtime/server/app.py",
    ],
)
def test_other_code_does_not(tree: Path, file: str) -> None:
    text = (tree / file).read_text(encoding="utf-8")
    assert not changes(tree, file, text, text + "\nOTHER = 1\n")


def test_comments_docstrings_and_line_breaks_do_not(tree: Path) -> None:
    step = "builder/program/step.py"
    assert not changes(tree, step, "# 1. Verify", "# 1. Verify and so on")
    assert not changes(tree, step, '"""The decode step', '"""The whole decode step')
    assert not changes(tree, step, '        """Run a greedy', '        """Run one greedy')
    assert not changes(tree, step, "class StepProgram", "\n\n\nclass StepProgram")


def test_the_sources_exist() -> None:
    """A folder that was moved would be left out without a word."""
    assert [pattern for pattern in SOURCES if not [*TREE.glob(pattern)]] == []
