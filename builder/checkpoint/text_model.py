"""Find a text model's tensors in checkpoints with a vision tower or with stacked experts."""

import re
from collections.abc import Iterator, Sequence

WRAPPED = "model.language_model."  # a text model beside a vision tower
TOWER = "model.visual."
STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")  # all experts: [X, out, in]
Part = tuple[int, int, int]  # expert, its first row, number of rows


def text_name(name: str) -> str | None:
    """Return a tensor's name in the text model; None if it belongs to the vision tower."""
    if name.startswith(TOWER):
        return None
    return f"model.{name.removeprefix(WRAPPED)}" if name.startswith(WRAPPED) else name


def unstacked(name: str, shape: Sequence[int]) -> Iterator[tuple[str, Part]]:
    """Yield the name and the part of each expert's weight in a stack; nothing for other tensors."""
    match = STACK.fullmatch(name)
    if match is None or len(shape) != 3:
        return
    experts, rows, _ = shape
    kinds = ("gate", "up") if match[2] == "gate_up" else ("down",)
    rows_each = rows // len(kinds)
    for e in range(experts):
        for i, kind in enumerate(kinds):
            yield f"{match[1]}.{e}.{kind}_proj.weight", (e, i * rows_each, rows_each)
