"""Find a text model's tensors in checkpoints with a vision tower, or with stacked weights."""

import re
from collections.abc import Iterator, Sequence

WRAPPED = "model.language_model."  # a text model beside a vision tower
OUTSIDE = "language_model."  # the same, as MLX has it
MODULES = "mtp."  # prefix of MTP modules, which some write inside the model
TOWERS = (
    *("model.visual.", "vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
    *("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    *("model.vision_embedder.", "model.audio_embedder."),
)
STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")  # all experts: [X, out, in]
# MLX's stacks, of experts and of kv_b_proj's heads, and a part of their numbers.
MLX_STACK = re.compile(
    r"(.*\.)(?:(?:switch_mlp|experts\.switch_glu)\.(\w+)|(embed_q|unembed_out))\.(weight\w*)"
)
Part = tuple[int, int, int]  # expert, its first row, number of rows
# Regular expressions of a publisher's names of weights, and ours for them, applied in turn.
Renames = Sequence[tuple[str, str]]


def find_text_name(name: str, renames: Renames = ()) -> str | None:
    """Return a tensor's name in the text model; None if it belongs to the vision tower."""
    if name.startswith(TOWERS):
        return None
    name = name.removeprefix(OUTSIDE)
    name = f"model.{name.removeprefix(WRAPPED)}" if name.startswith(WRAPPED) else name
    name = name.removeprefix("model.") if name.startswith(f"model.{MODULES}") else name
    for theirs, ours in renames:
        name = re.sub(theirs, ours, name)
    return name


def unstack(name: str, shape: Sequence[int]) -> Iterator[tuple[str, Part]]:
    """Yield the name and the part of each expert's weight in a stack; nothing for other tensors."""
    if match := MLX_STACK.fullmatch(name):
        at, projection, heads, leaf = match.groups()
        rows = shape[1] if len(shape) == 3 else 0  # 0: a number for each expert
        numbers = len(shape) == 1 and leaf.endswith("global_scale")
        for e in range(shape[0] if rows or numbers else 0):
            part = f"experts.{e}.{projection}" if projection else f"{heads}.{e}"
            yield f"{at}{part}.{leaf}", (e, 0, rows)
        return
    match = STACK.fullmatch(name)
    if match is None or len(shape) != 3:
        return
    experts, rows, _ = shape
    kinds = ("gate", "up") if match[2] == "gate_up" else ("down",)
    rows_each = rows // len(kinds)
    for e in range(experts):
        for i, kind in enumerate(kinds):
            yield f"{match[1]}.{e}.{kind}_proj.weight", (e, i * rows_each, rows_each)
