"""Reads a Hugging Face safetensors checkpoint tensor by tensor, checked against the table."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checkpoint.modules import refuse_stripped, stored_modules
from mtpbuild.builder.checkpoint.shards import find_shards, more
from mtpbuild.builder.models import ModelConfig, family_of, load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.copies import Config
from mtpbuild.builder.models.common.precision import FLOATS, hold_in
from mtpbuild.builder.models.common.weights import WHOLE, Share, Source, Weight
from mtpbuild.builder.quantize.formats import DTYPES, SUPPORTED, Format, Part, Shape, stored_format
from mtpbuild.builder.quantize.kept import NONE, Kept, KeptHeads, weight_of
from mtpbuild.runtime.contract.manifest import FloatType
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import ALONE

PIECE = 2048  # rows of a large weight that are in memory at once: whole blocks of all formats
# What other programs store and none of ours needs: caches here are not quantised.
UNUSED = (".rotary_emb.inv_freq", ".k_proj.k_scale", ".v_proj.v_scale")


@dataclass(frozen=True)
class Stored(Part):
    """A tensor's dtype and shape, and where it is."""

    file: Path
    name: str  # in the file


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder by name; bytes are read when asked for."""

    folder: Path
    tensors: Mapping[str, Stored]

    def format(self, name: str) -> Format | None:
        """The number format of a quantised weight."""
        return stored_format(name, self.tensors)

    def read(self, name: str) -> Tensor:
        """One weight in fp32, dequantised; raises CheckpointError if it holds NaN or Inf."""
        if (format := self.format(name)) is None:
            tensor = self.stored(name).float()
        else:
            tensor = format.decode(self.parts(name))
        self._refuse_not_finite(name, tensor)
        return tensor

    def parts(self, name: str) -> dict[str, Tensor]:
        """A quantised weight's values and scales, by suffix; raises CheckpointError as `read`."""
        format = self.format(name)
        assert format is not None
        parts = {suffix: self.stored(name + suffix) for suffix in format.parts((1, 1))}
        for suffix, part in parts.items():
            if part.is_floating_point():
                self._refuse_not_finite(name + suffix, part.float())
        return parts

    def rows(self, name: str) -> Iterator[Tensor]:
        """A weight as `read` gives it, some rows at a time."""
        if self.format(name) is not None:
            yield from self.read(name).split(PIECE)
            return
        for piece in map(Tensor.float, self._pieces(name)):
            self._refuse_not_finite(name, piece)
            yield piece

    def stored(self, name: str) -> Tensor:
        """One tensor as it is in its file."""
        with self._opened(name) as (file, stored):
            tensor: Tensor = file.get_tensor(stored.name)
            return tensor

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[Any, Stored]]:
        """The file that a tensor is in; raises CheckpointError if it can't be read."""
        stored = self.tensors[name]
        try:
            with safe_open(stored.file, framework="pt") as file:
                yield file, stored
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{stored.file}: can't read {name} ({error})") from None

    def _refuse_not_finite(self, name: str, tensor: Tensor) -> None:
        if tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):  # or NaN
            raise self._wrong(name, "holds NaN or Inf")

    def _wrong(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.tensors[name].file}: tensor {name} {what}")

    def check(self, config: ModelConfig) -> list[Weight]:
        """The table of this checkpoint's weights, after every name, shape and dtype was checked.

        config: as `settle` has made it. Raises CheckpointError that names missing, left-over or
        wrong-shaped tensors.
        """
        family = family_of(config)
        table, same = family.weight_table(config, WHOLE), family.duplicates(config)
        wanted = {source.name: source for weight in table for source in weight.sources}
        self._refuse(set(wanted) - set(self.tensors), "missing tensor")
        known = set(wanted) | set(same)
        for source in wanted.values():
            known |= self._check_weight(source)
        for name in set(same) & set(self.tensors) - set(wanted):
            if self.format(name) is not None and same[name] in wanted:
                known |= self._check_weight(replace(wanted[same[name]], name=name))
        left = {n for n in self.tensors if n not in known and not n.endswith(UNUSED)}
        self._refuse(left, "tensor that this architecture does not have:")
        return table

    def settle(self, config: Config, drafts: bool = False) -> Config:
        """The configuration as this checkpoint bears it out: which MTP modules it really holds.

        drafts: they must be there; quantised and fine-tuned copies of models often lack them.
        Raises CheckpointError.
        """
        family = family_of(config)
        there = stored_modules(family, config, self.tensors)
        if drafts:
            refuse_stripped(self.folder, family, config, there)
        count = min(there, config.num_nextn_predict_layers)
        return self._own_copies(replace(config, num_nextn_predict_layers=count))

    def _own_copies(self, config: Config) -> Config:
        """The configuration with the MTP modules whose embedding or head is not the trunk's."""
        embeddings, heads = list[int](), list[int]()
        for copy in family_of(config).copies(config):
            there = {copy.name, copy.original} <= self.tensors.keys()
            if not there or self._equal(copy.name, copy.original):
                continue
            if copy.module is None:
                raise CheckpointError(
                    f"{self.folder}: {copy.name} differs from {copy.original}, which config.json "
                    "ties it to"
                )
            (heads if copy.head else embeddings).append(copy.module)
        return replace(config, own_embeddings=(*embeddings,), own_heads=(*heads,))

    def _equal(self, name: str, other: str) -> bool:
        """Compare two weights; those as large as a vocabulary go a piece at a time."""
        if self.format(name) is not None or self.format(other) is not None:
            return torch.equal(self.read(name), self.read(other))
        if self.tensors[name].shape != self.tensors[other].shape:
            return False
        pieces = zip(self._pieces(name), self._pieces(other), strict=True)
        return all(torch.equal(a.float(), b.float()) for a, b in pieces)

    def _pieces(self, name: str) -> Iterator[Tensor]:
        """Rows of a stored tensor, some at a time."""
        count = self.tensors[name].shape[0]
        for start in range(0, count, PIECE):
            with self._opened(name) as (file, stored):
                piece = file.get_slice(stored.name)[start : start + PIECE]
            yield piece

    def _refuse(self, names: Iterable[str], what: str) -> None:
        if found := sorted(names):
            raise CheckpointError(f"{self.folder}: {what} {found[0]}{more(len(found) - 1)}")

    def _check_weight(self, source: Source) -> set[str]:
        """Require the dtypes and shapes of all parts of a weight; returns their names."""
        name, format = source.name, self.format(source.name)
        if format is None or len(source.shape) != 2:
            if (dtype := self.tensors[name].dtype) not in DTYPES:
                raise self._wrong(name, f"is {dtype}; supported: {SUPPORTED}")
            self._check_shape(name, source.shape, "config.json")
            return {name}
        if not format.fits(source.shape):
            shape = f"of shape {list(source.shape)}"
            raise self._wrong(name, f"{shape} does not split into the blocks of {format.name}")
        parts = format.parts(source.shape)
        missing = (name + suffix for suffix in parts if name + suffix not in self.tensors)
        self._refuse(missing, "missing tensor")
        for suffix, part in parts.items():
            if (dtype := self.tensors[name + suffix].dtype) != part.dtype:
                raise self._wrong(name + suffix, f"is {dtype}, {format.name} needs {part.dtype}")
            self._check_shape(name + suffix, part.shape, f"{format.name} of {list(source.shape)}")
        return {name + suffix for suffix in parts} | {f"{name.removesuffix('weight')}input_scale"}

    def _check_shape(self, name: str, shape: Shape, why: str) -> None:
        if (found := self.tensors[name].shape) != shape:
            raise self._wrong(name, f"has shape {[*found]}, {why} makes it {[*shape]}")


def open_checkpoint(folder: Path) -> Checkpoint:
    """List the tensors of `model.safetensors` or of the shards that the index names."""
    paths, index = find_shards(folder)
    tensors: dict[str, Stored] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name in tensors:
                        other = tensors[name].file
                        raise CheckpointError(f"{path}: tensor {name} is in {other} too")
                    part = file.get_slice(name)
                    tensors[name] = Stored(part.get_dtype(), tuple(part.get_shape()), path, name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    if index is not None:
        index.check({name: stored.file for name, stored in tensors.items()})
    return Checkpoint(folder, tensors)


def open_slice(folder: Path, layers: LayersSlice | None) -> Checkpoint:
    """List the tensors of some layers, under the names that a model of these has; None: all."""
    checkpoint = open_checkpoint(folder)
    if layers is None:
        return checkpoint
    count = load_config(folder).num_hidden_layers
    renamed = ((layers.rename(name, count), stored) for name, stored in checkpoint.tensors.items())
    return replace(checkpoint, tensors={new: stored for new, stored in renamed if new is not None})


def stream_pieces(
    checkpoint: Checkpoint,
    table: list[Weight],
    kept: Mapping[str, Kept] = NONE,
    share: Share = WHOLE,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight of the table in its program's layout, contiguous, one at a time.

    Stacked experts come one by one: rows [1, ..] of one name. Weights are fp32, but those in `kept`
    come as values and scales, in turn for each expert. share: the table's.
    """
    for weight in table:
        if weight.name not in kept:
            for group in weight.groups:
                tensors = [share.cut(s, checkpoint.read(s.name)) for s in group]
                yield weight.name, weight.transform(*tensors).contiguous()
            continue
        own = replace(kept[weight.name], weight=weight, share=share)
        if isinstance(own, KeptHeads):
            yield from own.encoded(*(checkpoint.read(source.name) for source in weight.sources))
            continue
        for group in weight.groups:
            sources = [checkpoint.parts(source.name) for source in group]
            for name, suffix in own.stored.items():
                yield name, own.join(suffix, group, [parts[suffix] for parts in sources])


def joined(pieces: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole weights; pieces are the rows of each, values and scales of one in turn."""
    for _, owned in groupby(pieces, lambda named: weight_of(named[0])):
        rows = dict[str, list[Tensor]]()
        for name, piece in owned:
            rows.setdefault(name, []).append(piece)
        for name, found in rows.items():
            yield name, torch.cat(found) if len(found) > 1 else found[0]


def load_model(
    folder: Path, config: ModelConfig, dtype: FloatType = "float32", for_gpu: bool = False
) -> CausalLM:
    """The program's model with all its weights; raises CheckpointError."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.settle(config)
    model = family_of(config).make_model(config, ALONE)
    hold_in(model, FLOATS[dtype], for_gpu)
    types = {name: weight.dtype for name, weight in model.named_parameters()}
    weights = joined(stream_pieces(checkpoint, checkpoint.check(config)))
    model.load_state_dict({name: w.to(types[name]) for name, w in weights}, assign=True)
    return model.eval()
