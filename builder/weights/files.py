"""List the tensors of a checkpoint's files under the names of the text model's weights."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checkpoint.readable import read_object, read_quantisation
from mtpbuild.builder.checkpoint.shards import find_shards
from mtpbuild.builder.checkpoint.side_files import CONFIG
from mtpbuild.builder.checkpoint.text_model import find_text_name, unstack
from mtpbuild.builder.formats import Format, name_own
from mtpbuild.builder.formats.mlx import METHOD as MLX
from mtpbuild.builder.gguf.container import find_own_path
from mtpbuild.builder.lazy_torch import Tensor
from mtpbuild.builder.models import load_config
from mtpbuild.builder.weights.checkpoint import Checkpoint, FileEntry
from mtpbuild.builder.weights.gguf_folder import find_trunk, holds_gguf, list_gguf_weights
from mtpbuild.builder.weights.mlx_conversion import (
    ConvertedWeight,
    convert_mlx_weights,
    is_norm,
    is_turned,
)
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.safetensors_header import Header

# Means above which a norm of a head holds factors and not factors less 1. Of published heads the
# factors of the norms before `fc` have means of 0.27 and 0.49, others of about 1.
LEAST_JOINED, LEAST_FACTOR = 0.2, 0.5
logger = logging.getLogger(__name__)


def open_checkpoint(folder: Path) -> Checkpoint:
    """List the tensors of `model.safetensors`, of the shards that an index names, or of GGUF."""
    if holds_gguf(folder):
        return Checkpoint(find_own_path(find_trunk(folder)), dict(read_gguf_entries(folder)), 0, {})
    return collect_tensors(folder, map(list_entries, find_shards(folder)))


def collect_tensors(folder: Path, shards: Iterable[Iterable[FileEntry]]) -> Checkpoint:
    """Return the checkpoint of these shards' tensors, whose files need not be here."""
    tensors: dict[str, FileEntry] = {}
    files: dict[str, Path] = {}
    for entry in chain.from_iterable(shards):
        if entry.name in files:
            other = files[entry.name]
            raise CheckpointError(f"{entry.file}: tensor {entry.name} is in {other} too")
        files[entry.name], listed = entry.file, list_text_weights(entry)
        if twice := listed.keys() & tensors.keys():
            same = tensors[min(twice)].name
            raise CheckpointError(f"{entry.file}: {entry.name} and {same} are the same weight")
        tensors |= listed
    tower = sum(find_text_name(name) is None for name in files)
    return undo_changes(Checkpoint(folder, tensors, tower, read_quantisation(folder)))


@dataclass(frozen=True)
class RestoredSource:
    """A weight that MLX's conversion changed, as it was."""

    checkpoint: Checkpoint
    made: ConvertedWeight

    @property
    def format(self) -> Format | None:
        return None

    def read(self) -> Tensor:
        return self.made.change(*map(self.checkpoint.read, self.made.sources))


def undo_changes(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the weights that MLX's conversion changed as they were."""
    tensors = {**checkpoint.tensors}
    model_type = str(read_object(checkpoint.folder / CONFIG).get("model_type"))
    factors = find_factors(checkpoint, model_type)
    for made in convert_mlx_weights(checkpoint.tensors, checkpoint.settings, factors):
        entry = tensors[next(iter(made.sources))]
        for name in checkpoint.check_sources(made):
            tensors.pop(name, None)
        undone = RestoredSource(checkpoint, made)
        tensors[made.name] = FileEntry("F32", made.shape, entry.file, made.name, source=undone)
    return replace(checkpoint, tensors=tensors)


def find_factors(checkpoint: Checkpoint, model_type: str) -> set[str]:
    """Return which norms of Qwen3.5 hold their factors.

    MLX's conversion adds 1 to norms where it transposes convolutions, and in files of a head alone
    where names lack the prefix `mtp.`. Other tools leave out a head's norms, or some of them, so
    that the mean of each decides.
    """
    tensors, settings = checkpoint.tensors, checkpoint.settings
    turned = any(is_turned(name, entry.shape) for name, entry in tensors.items())
    alone = model_type.startswith("qwen3") and model_type.endswith("_mtp")
    prefixed = {name: name.startswith("mtp.") for name in tensors if is_norm(name)}
    usual = {name for name, of_mtp in prefixed.items() if turned or (alone and not of_mtp)}
    factors = {*usual}
    for name in prefixed if turned or alone or settings.get("quant_method") == MLX else ():
        if alone or prefixed[name]:
            with suppress(CheckpointError):  # the file may not be here yet
                least = LEAST_JOINED if "pre_fc_norm" in name else LEAST_FACTOR
                holds = checkpoint.tensor(name).float().mean().item() > least
                (factors.add if holds else factors.discard)(name)
    if unusual := sorted(factors ^ usual):
        said = f"has {'' if unusual[0] in factors else 'not '}added 1 to {len(unusual)} norms"
        why = f"of the MTP head ({unusual[0]}, ..), as their means tell; they are read so"
        note_once(f"{checkpoint.folder}: MLX's conversion {said} {why}")
    return factors


@cache  # a build opens a checkpoint several times
def note_once(note: str) -> None:
    logger.warning("note: %s", note)


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


def read_gguf_entries(folder: Path) -> Iterator[tuple[str, FileEntry]]:
    """Yield the tensors of a folder's GGUF files under the checkpoint's names."""
    for weight in list_gguf_weights(folder):
        for name, entry, source in weight.entries():
            yield name, FileEntry(entry.dtype, entry.shape, weight.file, name, source=source)


def list_text_weights(entry: FileEntry) -> dict[str, FileEntry]:
    """Return the text model's weights in one tensor of a file, by name."""
    name = find_text_name(entry.name)
    if name is None:
        return {}
    name = name_own(name)
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
