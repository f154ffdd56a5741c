"""What a build tells its user about an opened checkpoint."""

import logging
from collections import Counter
from collections.abc import Iterator

from mtpbuild.builder.models.common.copies import EMBEDDING, HEAD
from mtpbuild.builder.program.opened_model import OpenedModel, describe_counts


def log_notes(model: OpenedModel) -> None:
    """Log the notes on a checkpoint."""
    for note in list_notes(model):
        logging.getLogger(__name__).warning("note: %s", note)


def list_notes(model: OpenedModel) -> Iterator[str]:
    """Yield a line for each part of the checkpoint that the engine leaves out or changes."""
    dtype = model.style.dtype
    if counts := describe_counts(model.dequantised().elements()):
        yield f"quantised weights ({counts}) are dequantised: the engine holds them in {dtype}"
    if unfit := model.unfit:
        what = f"their columns do not split into blocks ({unfit[0]}, ..)"
        yield f"{len(unfit)} weights stay in {dtype}: {what}"
    if left := model.stored.left_out(model.config):
        yield f"the MTP head is left out ({left[0]}, ..): it is not whole, and no draft needs it"
    copies = {"embedding": model.config.own_embeddings, "head": model.config.own_heads}
    for what, modules in copies.items():
        if names := ", ".join(model.config.name_module(j) for j in modules):
            yield f"the {what} stored in {names} differs from the trunk's: drafts use it"
    if count := model.stored.tower:
        yield f"the vision tower ({count} tensors) is left out: the engine reads text alone"


def describe_formats(model: OpenedModel) -> str:
    """Say in which format checkpoint and engine have most products of trunk, head and module."""
    c, formats = model.config, dict[str, Counter[str]]()
    for name, held in model.table.stored_formats.items():
        layer = model.family.may_be_quantised(c, name)
        if layer is not None:
            part = "trunk" if layer < c.num_hidden_layers else "MTP module"
        elif name == (EMBEDDING if c.tie_word_embeddings else HEAD):
            part = "head"
        else:
            continue
        format = model.stored.format(name)
        stored = model.stored.tensors[name].dtype.lower() if format is None else format.name
        kept = model.style.dtype if held is None else held.name
        formats.setdefault(part, Counter())[f"{part} {stored}, held in {kept}"] += 1
    parts = (formats[part] for part in ("trunk", "head", "MTP module") if part in formats)
    return "; ".join(part.most_common(1)[0][0] for part in parts)
