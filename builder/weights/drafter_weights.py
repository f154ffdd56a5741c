"""The trained weights that a drafter of another package brings, joined to a checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.files import list_entries
from mtpbuild.runtime.contract.drafters import find_drafter
from mtpbuild.runtime.errors import CheckpointError

PREFIX = "drafter."  # of their names in checkpoint, model and engine


def find_brought_files(drafter: str | None, config: ModelConfig) -> list[Path]:
    """Return the files of a drafter's weights; raise CheckpointError for one that is not there."""
    files = [] if drafter is None else [*find_drafter(drafter).weights(config)]
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"drafter {drafter}: {path}: no such file")
    return files


def join_brought(
    checkpoint: Checkpoint, config: ModelConfig, files: Sequence[Path]
) -> tuple[Checkpoint, ModelConfig]:
    """Return the checkpoint with the weights of these files, and the configuration with them."""
    tensors, shapes = {**checkpoint.tensors}, []
    for entry in (each for path in files for each in list_entries(path)):
        name = PREFIX + entry.name
        if name in tensors:
            raise CheckpointError(f"{entry.file}: {entry.name} is in another file of the drafter")
        tensors[name] = entry
        shapes.append((name, entry.shape))
    joined = {**checkpoint.joined} | {path: {} for path in files}
    joined_checkpoint = replace(checkpoint, tensors=tensors, joined=joined)
    return joined_checkpoint, replace(config, drafter_weights=(*shapes,))
