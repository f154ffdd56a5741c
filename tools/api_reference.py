"""Writes the reference of the Python API, HTML pages that are made from docstrings.

    python tools/api_reference.py build/api

Fields are described by the comments beside or above them, settings of requests by their help.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pdoc

from mtpbuild.runtime.sampling.params import SETTINGS

SETTINGS_HELP = {name: setting.help for name, setting in SETTINGS.items()}
MODULES = ("mtpbuild.runtime", "mtpbuild.runtime.server")
FIELD = re.compile(r"((?:^    # .*\n)*)^    (\w+): [^#\n]*(?:  # (.*))?$", re.MULTILINE)


def document(name: str) -> pdoc.doc.Module:
    """Return a module's documentation, with descriptions of its classes' fields."""
    imported = import_module(name)
    for each in imported.__all__:  # pdoc does not see names that are imported on first use
        setattr(imported, each, getattr(imported, each))
    module = pdoc.doc.Module(imported)
    for found in module.classes:
        comments = dict(read_fields(found.obj))
        for member in found.members.values():
            if member.taken_from[0].startswith("mtpbuild."):
                member.taken_from = member.modulename, member.qualname  # not only a line's name
            text = comments.get(member.name) or SETTINGS_HELP.get(member.name, "")
            if isinstance(member, pdoc.doc.Variable) and text and not member.docstring:
                member.__dict__["docstring"] = text  # pdoc keeps it there
    return module


def read_fields(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a class and its bases with their comments."""
    for base in kind.__mro__:
        if base.__module__.startswith("mtpbuild."):
            for above, name, beside in FIELD.findall(inspect.getsource(base)):
                yield name, " ".join([*re.findall("# (.*)", above), beside]).strip()


def write(out: Path) -> list[Path]:
    """Write a page for each module; return them."""
    pdoc.render.configure(docformat="google", show_source=False, search=False)
    modules = {name: document(name) for name in MODULES}
    out.mkdir(parents=True, exist_ok=True)
    pages = []
    for name, module in modules.items():
        pages.append(out / f"{name.replace('.', '/')}.html")
        pages[-1].parent.mkdir(parents=True, exist_ok=True)
        pages[-1].write_text(pdoc.render.html_module(module, modules), encoding="utf-8")
    return pages


if __name__ == "__main__":
    for page in write(Path(sys.argv[1])):
        print(page)
