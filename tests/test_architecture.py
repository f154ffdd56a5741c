"""The table of changes in docs/architecture.md: its files exist, and toys need none of them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADING = "## To change something, open these files"
CODE = ("builder", "runtime", "plugins", "recipes")
# What other packages could bring, with the words by which the code would have to know each.
TOYS = {
    "target": ("tests/support/toy_target", r"\btoy(_log|_mark)?\b|Toy[A-Z]"),
    "drafter": (
        "tests/support/lookup.py",
        r"\b(lookup|LOOKUP|Lookup)\b(?=[\"':(])|tests\.support\.lookup",
    ),
    "family": ("tests/support/toy_family.py", r"\bToy[A-Z]\w*|\btoy\b"),
    "rule": ("tests/support/typical.py", r"\btypical(_(?!p\b)\w+)?\b|\bTypical"),
}


def code_of(path: Path) -> str:
    """Read a file's code without comments and docstrings, where a toy may be an example."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match getattr(node, "body", None):
            case [ast.Expr(ast.Constant(str())) as said, *_]:
                said.value = ast.Constant("")
    return ast.unparse(tree)


def table() -> dict[str, str]:
    """Read the table: a change -> the text beside it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(HEADING)
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", rest.partition("\n## ")[0], re.MULTILINE)
    return {change: files for change, files in rows if change != "change"}


def named(files: str) -> tuple[list[Path], list[str]]:
    """Find a row's paths and its other names; a bare file lies where the path before it does."""
    paths, words, folder = list[Path](), list[str](), ROOT
    for name in re.findall(r"`([^`]+)`", files):
        if "/" in name or name.endswith(".py"):
            paths.append((ROOT if "/" in name else folder) / name)
            folder = paths[-1] if name.endswith("/") else paths[-1].parent
        else:
            words.append(name)
    return paths, words


def test_there_are_rows() -> None:
    assert len(table()) >= 8
    assert {"a new rule of acceptance", "a new target", "a new model family"} <= table().keys()


@pytest.mark.parametrize("change", table())
def test_what_a_row_names_exists(change: str) -> None:
    """Its paths do; a name without a path is in one of the row's files, or is one in a folder."""
    paths, words = named(table()[change])
    assert paths
    assert [path for path in paths if not path.exists()] == []
    files = [path for path in paths if path.is_file()]
    texts = "".join(path.read_text(encoding="utf-8") for path in files)
    folders = [path for path in paths if path.is_dir()]
    for word in words:
        inside = any((folder / word).exists() for folder in folders)
        assert inside or re.search(rf"\b{re.escape(word)}\b", texts), word


@pytest.mark.parametrize("kind", TOYS)
def test_a_toy_needs_no_file_outside_of_the_tests(kind: str) -> None:
    place, words = TOYS[kind]
    assert place in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    own = [ROOT / place] if place.endswith(".py") else [*(ROOT / place).glob("*.py")]
    assert any(re.search(words, code_of(path)) for path in own)
    code = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    assert len(code) > 250
    assert [path for path in code if re.search(words, code_of(path))] == []
