"""Find and hash the code that makes an engine: all that tracing and lowering import."""

import ast
import hashlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "mtpbuild"
TREE = Path(__file__).parents[1]
# These modules import the rest: weights, the step program, operators, the contract.
STAGES = ("builder.program.opened_model", "builder.weights.placed", "builder.program.trace")
# The only modules of the runtime that graphs depend on.
CONTRACT = (f"{PACKAGE}.runtime.contract.", f"{PACKAGE}.runtime.ranks")
# It imports all families, but an engine depends only on its own, which the caller names.
REGISTRY = f"{PACKAGE}.builder.models"
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def hash_of_code(*modules: str, tree: Path = TREE) -> str:
    """Return the sha256 of all code that these modules and the stages of a build import.

    Comments, docstrings and line breaks don't count. The folder of a model family or an operator
    counts as a whole, since its modules are imported late and by name. tree: this package's folder.
    """
    found, todo = dict[str, str](), [*(f"{PACKAGE}.{stage}" for stage in STAGES), *modules]
    own = {name.partition(".")[0] for name in todo}
    while todo:
        name = todo.pop()
        path = None if name in found else _file(name, tree)
        if path is None:
            continue
        found[name], imported = _read(path.read_text(encoding="utf-8"))
        if name != REGISTRY:
            names = (*imported, *_siblings(name, path, tree))
            todo += [each for each in names if each.partition(".")[0] in own and _counts(each)]
    return hashlib.sha256("\n".join(f"{n}\n{found[n]}" for n in sorted(found)).encode()).hexdigest()


@cache
def _read(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a module's code without docstrings, and the names that it imports."""
    code = ast.parse(text)
    imported = tuple(_imports(code))
    for node in ast.walk(code):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(code), imported


def _counts(name: str) -> bool:
    return not name.startswith(f"{PACKAGE}.runtime") or name.startswith(CONTRACT)


def _file(name: str, tree: Path) -> Path | None:
    """Return a module's file, or None if the name is not a module's but, say, a function's."""
    root, *rest = name.split(".")
    module = sys.modules.get(root)
    folders = [str(tree)] if root == PACKAGE else [*getattr(module, "__path__", ())]
    if not folders:
        found = None if rest else getattr(module, "__file__", None)
        return None if found is None else Path(found)
    place = Path(folders[0]).joinpath(*rest)
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _imports(code: ast.AST) -> Iterator[str]:
    """Yield all names that a module imports, at any depth, except those for types alone."""
    for node in ast.iter_child_nodes(code):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(f"{PACKAGE}."):
            yield str(node.value)  # imported late, by this name
        else:
            yield from _imports(node)


def _siblings(name: str, path: Path, tree: Path) -> Iterator[str]:
    """Yield the other modules of a folder that is a family's or an operator's."""
    families, operators = tree / "builder" / "models", tree / "plugins"
    folder = path.parent
    if folder.parent in (families, operators) and folder.name != "common":
        above = name if path.name == "__init__.py" else name.rpartition(".")[0]
        names = (file.stem for file in folder.glob("*.py"))
        yield from (above if stem == "__init__" else f"{above}.{stem}" for stem in names)
