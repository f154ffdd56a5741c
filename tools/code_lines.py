"""Counts lines of code: `python tools/code_lines.py builder runtime plugins`.

A line counts if it holds a token that is neither a comment nor part of a docstring. Blank lines do
not count, but all lines of a multi-line string that is a value do.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

IDLE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code_lines(source: str) -> int:
    """Count the lines of one file's text that hold code."""
    held = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in IDLE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - docstring_lines(source))


def docstring_lines(source: str) -> set[int]:
    """Return the line numbers of the docstrings of a module, its classes and its functions."""
    found = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first is not None:
                found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def main(folders: list[str]) -> None:
    total = 0
    for folder in folders:
        files = sorted(Path(folder).rglob("*.py"))
        count = sum(code_lines(path.read_text(encoding="utf-8")) for path in files)
        print(f"{folder}: {count:,} lines of code in {len(files)} files")
        total += count
    print(f"all: {total:,}")


if __name__ == "__main__":
    main(sys.argv[1:])
