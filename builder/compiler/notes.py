"""What a build tells its user about an opened checkpoint."""

import logging
from collections.abc import Iterator

from mtpbuild.builder.formats.integers import WIDE
from mtpbuild.builder.program.opened_model import OpenedModel


def log_notes(model: OpenedModel) -> None:
    """Log the notes on a checkpoint."""
    for note in list_notes(model):
        logging.getLogger(__name__).warning("note: %s", note)


def list_notes(model: OpenedModel) -> Iterator[str]:
    """Yield a line for each part of the checkpoint that the engine leaves out or changes."""
    dtype, counts = model.style.dtype, sorted(model.dequantised().items())
    if found := ", ".join(f"{count} in {name}" for name, count in counts):
        yield f"quantised weights ({found}) are dequantised: the engine holds them in {dtype}"
    if count := sum(bool(held) and each in WIDE.values() for each, held in model.quantised()):
        yield f"{count} weights with fp32 scales get fp16 ones, quantised anew where inexact"
    if unfit := model.unfit:
        what = f"their columns do not split into blocks ({unfit[0]}, ..)"
        yield f"{len(unfit)} weights stay in {dtype}: {what}"
    own = {"embedding": model.config.own_embeddings, "head": model.config.own_heads}
    for what, modules in own.items():
        if names := ", ".join(model.family.module_name(model.config, j) for j in modules):
            yield f"the {what} stored in {names} differs from the trunk's: drafts use it"
    if count := model.stored.tower:
        yield f"the vision tower ({count} tensors) is left out: the engine reads text alone"
