"""Damages an engine directory at random, as drawn by hypothesis."""

import json
from pathlib import Path

from hypothesis import strategies as st

from mtpbuild.runtime.contract.manifest import MANIFEST

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1000) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)


def damage(folder: Path, data: st.DataObject) -> None:
    """Damage one thing in an engine directory, whose files may be hard links to another's."""
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    kind = data.draw(st.sampled_from(["flip", "cut", "append", "delete", "folder", "add", "edit"]))
    if kind in ("flip", "cut", "append") and path.is_file():
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        if kind == "flip" and content:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del content[at:]
        else:
            content += data.draw(st.binary(min_size=1, max_size=9))
        replace(path, bytes(content))
    elif kind in ("delete", "folder") and path.is_file():
        path.unlink()
        if kind == "folder":
            path.mkdir()
    elif kind == "add":
        (folder / data.draw(st.sampled_from(["a", ".hidden", "tokenizer.model"]))).touch()
    elif (folder / MANIFEST).is_file():
        edit_at_random(folder / MANIFEST, data)


def edit_at_random(path: Path, data: st.DataObject) -> None:
    """Change, remove or add one value anywhere in a JSON file."""
    try:
        node = raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return
    while isinstance(node, dict) and node:
        key = data.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[key], dict) or data.draw(st.integers(0, 3)) == 0:
            action = data.draw(st.sampled_from(["set", "delete", "add"]))
            if action == "delete":
                del node[key]
            else:
                node[key if action == "set" else key + "x"] = data.draw(JSON_VALUES)
            break
        node = node[key]
    replace(path, json.dumps(raw).encode())


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)
