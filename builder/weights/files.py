"""List the tensors of a checkpoint's files under the names of the text model's weights."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checkpoint.readable import read_quantisation
from mtpbuild.builder.checkpoint.shards import find_shards
from mtpbuild.builder.checkpoint.text_model import Renames, find_text_name, unstack
from mtpbuild.builder.formats import name_own
from mtpbuild.builder.gguf.container import find_own_path
from mtpbuild.builder.gguf.mapped import GgufWeight
from mtpbuild.builder.models import load_config, read_renames
from mtpbuild.builder.weights.checkpoint import Checkpoint, FileEntry
from mtpbuild.builder.weights.gguf_folder import find_trunk, holds_gguf, list_gguf_weights
from mtpbuild.builder.weights.mlx_conversion import undo_changes
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.safetensors_header import Header


def open_checkpoint(folder: Path) -> Checkpoint:
    """List the tensors of `model.safetensors`, of the shards that an index names, or of GGUF."""
    if holds_gguf(folder):
        return describe_gguf(find_own_path(find_trunk(folder)), list_gguf_weights(folder))
    shards = map(list_entries, find_shards(folder))
    return collect_tensors(folder, shards, read_renames(folder))


def describe_gguf(path: Path, weights: Iterable[GgufWeight]) -> Checkpoint:
    """Return the checkpoint of a GGUF file's weights."""
    tensors = {
        name: FileEntry(entry.dtype, entry.shape, weight.file, name, source=source)
        for weight in weights
        for name, entry, source in weight.entries()
    }
    return Checkpoint(path, tensors, 0, {})


def collect_tensors(
    folder: Path, shards: Iterable[Iterable[FileEntry]], renames: Renames = ()
) -> Checkpoint:
    """Return the checkpoint of these shards' tensors, whose files need not be here."""
    tensors: dict[str, FileEntry] = {}
    files: dict[str, Path] = {}
    for entry in chain.from_iterable(shards):
        if entry.name in files:
            other = files[entry.name]
            raise CheckpointError(f"{entry.file}: tensor {entry.name} is in {other} too")
        files[entry.name], listed = entry.file, list_text_weights(entry, renames)
        if twice := listed.keys() & tensors.keys():
            same = tensors[min(twice)].name
            raise CheckpointError(f"{entry.file}: {entry.name} and {same} are the same weight")
        tensors |= listed
    tower = sum(find_text_name(name) is None for name in files)
    return undo_changes(Checkpoint(folder, tensors, tower, read_quantisation(folder)))


def list_entries(path: Path) -> list[FileEntry]:
    """List the tensors of a safetensors file."""
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return [
                FileEntry(tensor.get_dtype(), tuple(tensor.get_shape()), path, name)
                for name, tensor in slices.items()
            ]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None


def describe_tensors(path: Path, header: Header) -> list[FileEntry]:
    """List the tensors in the header of a file that may be elsewhere."""
    try:
        return [FileEntry(e["dtype"], tuple(e["shape"]), path, n) for n, e in header.items()]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: its header is damaged ({error!r})") from None


def list_text_weights(entry: FileEntry, renames: Renames) -> dict[str, FileEntry]:
    """Return the text model's weights in one tensor of a file, by name."""
    name = find_text_name(entry.name, renames)
    if name is None:
        return {}
    name = name_own(name, entry.dtype)
    experts = {
        part_name: replace(entry, shape=(part[2], *entry.shape[2:]) if part[2] else (), part=part)
        for part_name, part in unstack(name, entry.shape)
    }
    return experts or {name: entry}


def cut_tensors(checkpoint: Checkpoint, layers: LayersSlice | None) -> Checkpoint:
    """Return the tensors of a slice, renamed for a model of its layers alone; None: all layers."""
    if layers is None:
        return checkpoint
    count = load_config(checkpoint.folder).num_hidden_layers
    renamed = ((layers.rename(name, count), entry) for name, entry in checkpoint.tensors.items())
    return replace(checkpoint, tensors={new: entry for new, entry in renamed if new is not None})
