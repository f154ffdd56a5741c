"""Read the tensors of a Hugging Face checkpoint, and check them against a family's table."""

from __future__ import annotations  # Tensor is imported for types alone

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checkpoint.readable import read_quantisation
from mtpbuild.builder.checkpoint.shards import find_shards, more
from mtpbuild.builder.checkpoint.text_model import Part, text_name, unstacked
from mtpbuild.builder.formats import (
    DTYPES,
    SUPPORTED,
    Entry,
    Format,
    Settings,
    Shape,
    own_name,
    stored_format,
)
from mtpbuild.builder.lazy_torch import torch
from mtpbuild.builder.models import ModelConfig, family_of, load_config
from mtpbuild.builder.models.common.copies import Config
from mtpbuild.builder.models.common.weight import Stored
from mtpbuild.builder.models.modules import refuse_stripped, stored_modules
from mtpbuild.builder.weights.table import WeightTable, family_table
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 2048  # rows of a large weight in memory at once, a multiple of all formats' blocks
# Suffixes of tensors for other engines, such as scales of quantised caches, which ours don't have.
UNUSED = (".rotary_emb.inv_freq", ".k_proj.k_scale", ".v_proj.v_scale")


@dataclass(frozen=True)
class FileEntry(Entry):
    """An entry of a safetensors header, with the place of its tensor."""

    file: Path
    name: str  # in the file
    part: Part | None = None  # where an expert's weight lies, if the tensor is a stack of them


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint folder by name; their bytes are read on demand."""

    folder: Path
    tensors: Mapping[str, FileEntry]
    tower: int  # number of a vision tower's tensors, which are left out
    settings: Settings  # of its quantisation

    def format(self, name: str) -> Format | None:
        """Return the number format of a weight; None if it is not quantised."""
        return stored_format(name, self.tensors, self.settings)

    def read(self, name: str) -> Tensor:
        """Read a weight in fp32, dequantised; raise CheckpointError if it has NaN or Inf."""
        if (format := self.format(name)) is None:
            tensor = self.tensor(name).float()
        else:
            tensor = format.decode(self.parts(name))
        self._refuse_not_finite(name, tensor)
        return tensor

    def parts(self, name: str) -> dict[str, Tensor]:
        """Read a quantised weight's values and scales, by suffix; raise errors as `read` does."""
        format = self.format(name)
        assert format is not None
        parts = {suffix: self.tensor(name + suffix) for suffix in format.suffixes}
        for suffix, part in parts.items():
            if part.is_floating_point():
                self._refuse_not_finite(name + suffix, part.float())
        if (fault := format.fault(parts)) is not None:
            raise self._wrong(name, fault)
        return parts

    def kept_parts(self, name: str) -> dict[str, Tensor]:
        """Read a quantised weight's parts in the format in which engines keep it."""
        format = self.format(name)
        assert format is not None
        return format.keep(name, self.parts(name))

    def rows(self, name: str) -> Iterator[Tensor]:
        """Read a weight as `read` does, but yield some rows at a time."""
        if self.format(name) is not None or self.tensors[name].part is not None:
            yield from self.read(name).split(PIECE)
            return
        for start in range(0, self.tensors[name].shape[0], PIECE):
            with self._opened(name) as (file, entry):
                piece = file.get_slice(entry.name)[start : start + PIECE].float()
            self._refuse_not_finite(name, piece)
            yield piece

    def tensor(self, name: str) -> Tensor:
        """Read a tensor as it is stored."""
        with self._opened(name) as (file, entry):
            if entry.part is None:
                tensor: Tensor = file.get_tensor(entry.name)
                return tensor
            expert, first, rows = entry.part
            own: Tensor = file.get_slice(entry.name)[expert : expert + 1, first : first + rows]
            return own[0]

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[Any, FileEntry]]:
        """Open the file that holds a tensor; raise CheckpointError if it can't be read."""
        entry = self.tensors[name]
        try:
            with safe_open(entry.file, framework="pt") as file:
                yield file, entry
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file}: can't read {name} ({error})") from None

    def _refuse_not_finite(self, name: str, tensor: Tensor) -> None:
        if tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):  # NaN gives NaN
            raise self._wrong(name, "holds NaN or Inf")

    def _wrong(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.tensors[name].file}: tensor {name} {what}")

    def check(self, config: ModelConfig, ranks: Ranks = ALONE) -> WeightTable:
        """Check the name, shape and dtype of every tensor, and return the model's weight table.

        config: the result of `settle`. Raises CheckpointError, which names the first missing,
        left-over or wrong-shaped tensor.
        """
        table, copies = family_table(config, ranks), family_of(config).duplicates(config)
        wanted = table.stored
        self._refuse(set(wanted) - set(self.tensors), "missing tensor")
        known = set(wanted) | set(copies)
        for stored in wanted.values():
            known |= self._check_weight(stored)
        for name in set(copies) & set(self.tensors) - set(wanted):
            if self.format(name) is not None and copies[name] in wanted:
                known |= self._check_weight(replace(wanted[copies[name]], name=name))
        left = {n for n in self.tensors if n not in known and not n.endswith(UNUSED)}
        self._refuse(left, "tensor that this architecture does not have:")
        return table

    def settle(self, config: Config, drafts: bool = False) -> Config:
        """Return the configuration with the MTP modules that this checkpoint really holds.

        Quantised and fine-tuned copies of models often lack modules; with `drafts` a missing one
        raises CheckpointError.
        """
        family = family_of(config)
        stored_count = stored_modules(family, config, self.tensors)
        if drafts:
            refuse_stripped(self.folder, family, config, stored_count)
        count = min(stored_count, config.num_nextn_predict_layers)
        return self._own_copies(replace(config, num_nextn_predict_layers=count))

    def _own_copies(self, config: Config) -> Config:
        """Return the configuration with `own_embeddings` and `own_heads` by the tensors."""
        embeddings, heads = list[int](), list[int]()
        for copy in family_of(config).copies(config):
            both = {copy.name, copy.original} <= self.tensors.keys()
            if not both or self._equal(copy.name, copy.original):
                continue
            if copy.module is None:
                raise CheckpointError(
                    f"{self.folder}: {copy.name} differs from {copy.original}, which config.json "
                    "ties it to"
                )
            (heads if copy.head else embeddings).append(copy.module)
        return replace(config, own_embeddings=(*embeddings,), own_heads=(*heads,))

    def _equal(self, name: str, other: str) -> bool:
        """Compare two weights some rows at a time, as an embedding may be large."""
        pairs = zip_longest(self.rows(name), self.rows(other), fillvalue=torch.empty(0))
        return all(torch.equal(one, two) for one, two in pairs)

    def _refuse(self, names: Iterable[str], what: str) -> None:
        if found := sorted(names):
            raise CheckpointError(f"{self.folder}: {what} {found[0]}{more(len(found) - 1)}")

    def _check_weight(self, stored: Stored) -> set[str]:
        """Check the dtypes and shapes of all parts of a weight; return their names."""
        name, format = stored.name, self.format(stored.name)
        if format is None or len(stored.shape) != 2:
            if (dtype := self.tensors[name].dtype) not in DTYPES:
                raise self._wrong(name, f"is {dtype}; supported: {SUPPORTED}")
            self._check_shape(name, stored.shape, "config.json")
            return {name}
        if not format.fits(stored.shape):
            shape = f"of shape {list(stored.shape)}"
            raise self._wrong(name, f"{shape} does not split into the blocks of {format.name}")
        parts = format.parts(stored.shape)
        missing = (name + suffix for suffix in parts if name + suffix not in self.tensors)
        self._refuse(missing, "missing tensor")
        for suffix, entry in parts.items():
            if (dtype := self.tensors[name + suffix].dtype) != entry.dtype:
                raise self._wrong(name + suffix, f"is {dtype}, {format.name} needs {entry.dtype}")
            self._check_shape(name + suffix, entry.shape, f"{format.name} of {list(stored.shape)}")
        return {name + suffix for suffix in parts} | {f"{name.removesuffix('weight')}input_scale"}

    def _check_shape(self, name: str, shape: Shape, why: str) -> None:
        if (found := self.tensors[name].shape) != shape:
            raise self._wrong(name, f"has shape {[*found]}, {why} makes it {[*shape]}")


def open_checkpoint(folder: Path) -> Checkpoint:
    """List the tensors of `model.safetensors` or of the shards that the index names."""
    paths, index = find_shards(folder)
    tensors: dict[str, FileEntry] = {}
    files: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name in files:
                        raise CheckpointError(f"{path}: tensor {name} is in {files[name]} too")
                    tensor, files[name] = file.get_slice(name), path
                    shape = tuple(tensor.get_shape())
                    found = entries(FileEntry(tensor.get_dtype(), shape, path, name))
                    if twice := found.keys() & tensors.keys():
                        other = tensors[min(twice)].name
                        raise CheckpointError(f"{path}: {name} and {other} are the same weight")
                    tensors |= found
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    if index is not None:
        index.check(files)
    tower = sum(text_name(name) is None for name in files)
    return Checkpoint(folder, tensors, tower, read_quantisation(folder))


def entries(entry: FileEntry) -> dict[str, FileEntry]:
    """Return the text model's weights in one tensor of a file, by name."""
    name = text_name(entry.name)
    if name is None:
        return {}
    name = own_name(name)
    experts = {
        own: replace(entry, shape=(part[2], entry.shape[2]), part=part)
        for own, part in unstacked(name, entry.shape)
    }
    return experts or {name: entry}


def open_slice(folder: Path, layers: LayersSlice | None) -> Checkpoint:
    """List the tensors of a slice, renamed for a model of its layers alone; None: all layers."""
    checkpoint = open_checkpoint(folder)
    if layers is None:
        return checkpoint
    count = load_config(folder).num_hidden_layers
    renamed = ((layers.rename(name, count), entry) for name, entry in checkpoint.tensors.items())
    return replace(checkpoint, tensors={new: entry for new, entry in renamed if new is not None})
