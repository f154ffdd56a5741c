"""Counts lines of code: `python tools/code_lines.py builder runtime plugins`.

A line of Python counts if it holds a token that is neither a comment nor part of a docstring. Blank
lines do not count, but all lines of a multi-line string that is a value do. A line of C++ counts if
it is neither blank nor begins with a comment.
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


def cpp_lines(source: str) -> int:
    """Count the lines of a C++ file's text that are neither blank nor comments."""
    return sum(not line.lstrip().startswith("//") for line in source.splitlines() if line.strip())


COUNTS = {"Python": (code_lines, ("*.py",)), "C++": (cpp_lines, ("*.h", "*.cpp"))}


def main(folders: list[str]) -> None:
    """Print the lines of each folder and of all of them, by language."""
    for language, (count, patterns) in COUNTS.items():
        total = 0
        for folder in folders:
            files = [path for pattern in patterns for path in sorted(Path(folder).rglob(pattern))]
            lines = sum(count(path.read_text(encoding="utf-8")) for path in files)
            if files:
                print(f"{folder}: {lines:,} lines of {language} in {len(files)} files")
            total += lines
        print(f"all: {total:,} lines of {language}")


if __name__ == "__main__":
    main(sys.argv[1:])
