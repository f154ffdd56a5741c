"""Read the tensors of a Hugging Face checkpoint, and check them against a family's table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open

from mtpbuild.builder.checkpoint.shards import more, offer_unnamed_head
from mtpbuild.builder.checkpoint.text_model import Part
from mtpbuild.builder.formats import (
    SUPPORTED,
    Entry,
    Format,
    Settings,
    Shape,
    find_stored_format,
    refuse_out_of_range,
)
from mtpbuild.builder.gguf.choice import explain_joining
from mtpbuild.builder.lazy_torch import Tensor, torch
from mtpbuild.builder.models import ModelConfig, find_family_of
from mtpbuild.builder.models.common.copies import Config
from mtpbuild.builder.models.common.weight import StoredTensor
from mtpbuild.builder.models.modules import (
    JOIN_A_HEAD_HINT,
    count_stored_modules,
    count_sure_modules,
    describe_stripped,
    is_module,
)
from mtpbuild.builder.weights.table import WeightTable, make_family_table
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import ALONE, Ranks

MAX_LOSS = 0.01  # relative, when scales and minima are rounded to fp16: usual is 0.0003
PIECE = 2048  # rows of a large weight in memory at once, a multiple of all formats' blocks
# Suffixes of tensors for other engines, such as scales of quantised caches, which ours don't have.
UNUSED = (
    ".rotary_emb.inv_freq",
    *(f".{x}_scale" for x in ("q", "k", "v", "kv", "prob", "prob_output")),
    *(f".{x}_zero_point" for x in "qkv"),
)
# Parts of a quantised module for kernels that quantise its inputs or outputs, too.
ACTIVATIONS = ("input_scale", "input_global_scale", "input_zero_point", "output_scale")


class TensorSource(Protocol):
    """What a weight is made of: tensors of a GGUF file, or weights that MLX changed."""

    @property
    def format(self) -> Format | None:
        """The format that the weight's file has alone; None if its parts' entries tell all."""

    def read(self) -> Tensor:
        """Read the tensor that the weight's entry describes."""


@dataclass(frozen=True)
class FileEntry(Entry):
    """An entry of a safetensors header, with the place of its tensor."""

    file: Path
    name: str  # in the file
    part: Part | None = None  # where an expert's weight lies, if the tensor is a stack of them
    source: TensorSource | None = None  # what it is made of, if it is not stored as it is


@dataclass(frozen=True)
class Loss:
    """What an encoding changed: the sum of squared changes, and of the weights' squares."""

    changes: float = 0.0
    squares: float = 0.0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.changes + other.changes, self.squares + other.squares)

    @property
    def relative(self) -> float:
        """The norm of the changes over the norm of the weights."""
        return (self.changes / self.squares) ** 0.5 if self.squares else 0.0

    def after(self, weight: Tensor, parts: Mapping[str, Tensor], format: Format) -> Loss:
        """Return the loss with that of one more weight, or of some of its rows."""
        changes = (format.decode(parts).view_as(weight) - weight).double().square().sum().item()
        return self + Loss(changes, weight.double().square().sum().item())


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint by name; their bytes are read on demand."""

    folder: Path  # or GGUF file, for messages
    tensors: Mapping[str, FileEntry]
    tower: int  # number of a vision tower's tensors, which are left out
    settings: Settings  # of its quantisation
    # The settings of files that are another checkpoint's, such as a head's.
    joined: Mapping[Path, Settings] = field(default_factory=dict, kw_only=True)
    # What rounding changed in weights whose format an engine can't keep, by weight.
    losses: dict[str, Loss] = field(default_factory=dict, kw_only=True)

    def format(self, name: str) -> Format | None:
        """Return the number format of a weight; None if it is not quantised."""
        entry = self.tensors[name]
        if entry.source is not None and entry.source.format is not None:
            return entry.source.format
        settings = self.joined.get(entry.file, self.settings)
        return find_stored_format(name, self.tensors, settings)

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
            raise self._make_error(name, fault)
        return parts

    def read_engine_parts(
        self, name: str, engine_format: Format | None = None
    ) -> dict[str, Tensor]:
        """Read a quantised weight's parts in the format in which an engine holds it.

        engine_format: None stands for the one in which engines keep the weight's format. Weights
        in formats that they don't keep are encoded anew, as floats are.
        """
        if (format := self.format(name)) is None:
            assert engine_format is not None
            return encode_anew(name, self.read(name), engine_format, self.losses)
        kept = format.engine_format
        if engine_format is not None and choose_read_format(format, engine_format) is not kept:
            return encode_anew(name, self.read(name), engine_format, self.losses)
        stored = self.parts(name)
        parts = format.to_engine_format(name, stored)
        if kept.offsets == "minima":  # fp16 may not have them, nor the scales
            loss = Loss().after(format.decode(stored), parts, kept)
            if loss.relative > MAX_LOSS:
                raise self._make_error(name, "has scales or minima that are out of fp16's range")
            self.losses.update({name: loss} if loss.changes else {})
        return parts

    def rows(self, name: str) -> Iterator[Tensor]:
        """Read a weight as `read` does, but yield some rows at a time."""
        entry = self.tensors[name]
        if self.format(name) is not None or entry.part is not None or entry.source is not None:
            yield from self.read(name).split(PIECE)
            return
        for start in range(0, entry.shape[0], PIECE):
            with self._open_file(name) as file:
                piece = file.get_slice(entry.name)[start : start + PIECE].float()
            self._refuse_not_finite(name, piece)
            yield piece

    def tensor(self, name: str) -> Tensor:
        """Read a tensor as it is stored."""
        entry = self.tensors[name]
        if entry.source is not None:
            return entry.source.read()
        tensor: Tensor
        with self._open_file(name) as file:
            if entry.part is None:
                tensor = file.get_tensor(entry.name)
                return tensor
            expert, first, rows = entry.part
            stack = file.get_slice(entry.name)
            of_expert = slice(expert, expert + 1)
            # The part of a stack of numbers is a number.
            tensor = stack[of_expert, first : first + rows] if entry.shape else stack[of_expert]
            return tensor[0]

    @contextmanager
    def _open_file(self, name: str) -> Iterator[Any]:
        """Open the file that holds a tensor; raise CheckpointError if it can't be read."""
        entry = self.tensors[name]
        try:
            with safe_open(entry.file, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file}: can't read {name} ({error})") from None

    def _refuse_not_finite(self, name: str, tensor: Tensor) -> None:
        if tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):  # NaN gives NaN
            raise self._make_error(name, "holds NaN or Inf")

    def _make_error(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.tensors[name].file}: tensor {name} {what}")

    def check(self, config: ModelConfig, ranks: Ranks = ALONE) -> WeightTable:
        """Check the name, shape and dtype of every tensor, and return the model's weight table.

        config: the result of `settle`. Raises CheckpointError, which names the first missing,
        left-over or wrong-shaped tensor.
        """
        table, copies = make_family_table(config, ranks), find_family_of(config).duplicates(config)
        wanted = table.stored
        self._refuse(set(wanted) - set(self.tensors), "missing tensor")
        known = set(wanted) | set(copies)
        for stored in wanted.values():
            known |= self._check_weight(stored)
        for name in set(copies) & set(self.tensors) - set(wanted):
            if self.format(name) is not None and copies[name] in wanted:
                known |= self._check_weight(replace(wanted[copies[name]], name=name))
        left = {n for n in self.tensors if n not in known and not n.endswith(UNUSED)}
        left -= set(self.left_out(config))
        left = {name for name in left if not find_family_of(config).leaves_out(config, name)}
        self._refuse(left, "tensor that this architecture does not have:")
        return table

    def settle(self, config: Config, drafts: bool | None = None) -> Config:
        """Return the configuration with the MTP modules that this checkpoint really holds.

        Quantised and fine-tuned copies of models often lack modules; with `drafts` a missing one
        raises CheckpointError. One that lacks tensors does, too, unless `drafts` is False.
        """
        return self._find_own_copies(self.settle_modules(config, drafts))

    def settle_modules(self, config: Config, drafts: bool | None = None) -> Config:
        """Do the part of `settle` that reads names alone, and not the values of copies."""
        family = find_family_of(config)
        stored = count_stored_modules(family, config, self.tensors)
        stripped = describe_stripped(self.folder, config, stored) if drafts else None
        count = min(stored, config.num_nextn_predict_layers)
        config = replace(config, num_nextn_predict_layers=count)
        fault = stripped or (self._find_fault(config, head=True) if count else None)
        if fault is None:
            return config
        if drafts is False:
            return replace(config, num_nextn_predict_layers=0)
        # A fault of the whole checkpoint is none of its head alone.
        trunk_fault = self._find_fault(config, head=False)
        instead = explain_joining(self.folder) or offer_unnamed_head(self.folder)
        raise CheckpointError(trunk_fault or f"{fault}: {JOIN_A_HEAD_HINT}{instead}")

    def left_out(self, config: ModelConfig) -> list[str]:
        """List the tensors of MTP modules that a settled configuration does not count."""
        family, first = find_family_of(config), config.num_hidden_layers
        stored = count_sure_modules(family, config, self.tensors)
        counted = config.head.cached_layers if config.head else config.num_nextn_predict_layers
        left = range(first + counted, first + stored)
        places = {name: family.place(config, name) for name in self.tensors} if left else {}
        return [name for name, place in places.items() if place is not None and place[0] in left]

    def _find_fault(self, config: ModelConfig, head: bool) -> str | None:
        """Say what is wrong with the modules' tensors, or the trunk's; None if nothing is."""
        family, stored = find_family_of(config), make_family_table(config).stored
        wanted = [each for name, each in stored.items() if is_module(family, config, name) == head]
        where = replace(self, folder=min(self.joined).parent) if self.joined and head else self
        missing = "its MTP layers are not whole: missing tensor" if head else "missing tensor"
        try:
            where._refuse((each.name for each in wanted if each.name not in self.tensors), missing)
            for each in wanted:
                where._check_weight(each)
        except CheckpointError as error:
            return str(error)
        return None

    def _find_own_copies(self, config: Config) -> Config:
        """Return the configuration with `own_embeddings` and `own_heads` by the tensors."""
        embeddings, heads = list[int](), list[int]()
        for copy in find_family_of(config).copies(config):
            both = {copy.name, copy.original} <= self.tensors.keys()
            if not both or self._are_equal(copy.name, copy.original):
                continue
            if copy.module is None:
                raise CheckpointError(
                    f"{self.folder}: {copy.name} differs from {copy.original}, which config.json "
                    "ties it to"
                )
            (heads if copy.head else embeddings).append(copy.module)
        return replace(config, own_embeddings=(*embeddings,), own_heads=(*heads,))

    def _are_equal(self, name: str, other: str) -> bool:
        """Compare two weights some rows at a time, as an embedding may be large."""
        pairs = zip_longest(self.rows(name), self.rows(other), fillvalue=torch.empty(0))
        return all(torch.equal(one, two) for one, two in pairs)

    def _refuse(self, names: Iterable[str], what: str) -> None:
        if listed := sorted(names):
            raise CheckpointError(f"{self.folder}: {what} {listed[0]}{more(len(listed) - 1)}")

    def _check_weight(self, stored: StoredTensor) -> set[str]:
        """Check the dtypes and shapes of all parts of a weight; return their names."""
        name, format = stored.name, self.format(stored.name)
        if format is None or len(stored.shape) != 2:
            if not (whole := self.tensors[name]).floats and not stored.has_ids:
                raise self._make_error(name, f"is {whole.dtype}; supported: {SUPPORTED}")
            self._check_shape(name, stored.shape, "config.json")
            return {name}
        if not format.fits(stored.shape):
            shape = f"of shape {list(stored.shape)}"
            raise self._make_error(name, f"{shape} does not split into the blocks of {format.name}")
        parts = format.parts(stored.shape)
        missing = (name + suffix for suffix in parts if name + suffix not in self.tensors)
        self._refuse(missing, "missing tensor")
        for suffix, entry in parts.items():
            part = name + suffix
            if (dtype := self.tensors[part].dtype) != entry.dtype:
                raise self._make_error(part, f"is {dtype}, {format.name} needs {entry.dtype}")
            self._check_shape(part, entry.shape, f"{format.name} of {list(stored.shape)}")
        module = name.removesuffix("weight")
        return {name + suffix for suffix in parts} | {module + part for part in ACTIVATIONS}

    def check_sources(self, shapes: Mapping[str, Shape]) -> set[str]:
        """Check the weights that a weight is made of; return the names of all their parts."""
        self._refuse(shapes.keys() - self.tensors.keys(), "missing tensor")
        return set().union(*(self._check_weight(StoredTensor(*named)) for named in shapes.items()))

    def _check_shape(self, name: str, shape: Shape, why: str) -> None:
        if (stored_shape := self.tensors[name].shape) != shape:
            raise self._make_error(name, f"has shape {[*stored_shape]}, {why} makes it {[*shape]}")


def choose_read_format(format: Format, engine_format: Format) -> Format:
    """Return the format in which an engine that holds `engine_format` reads `format`."""
    usual = format.engine_format
    return engine_format if engine_format.packs and not engine_format.represents(usual) else usual


def encode_anew(
    name: str, weight: Tensor, engine_format: Format, losses: dict[str, Loss]
) -> dict[str, Tensor]:
    """Encode a weight in another format; note the loss in `losses`."""
    pieces: list[dict[str, Tensor]] = []
    loss = Loss()
    refuse_out_of_range(engine_format, name, weight)
    for rows in weight.split(PIECE):
        pieces.append(engine_format.encode(rows))
        loss = loss.after(rows, pieces[-1], engine_format)
    losses[name] = loss
    return {
        suffix: torch.cat([piece[suffix] for piece in pieces]) for suffix in engine_format.suffixes
    }
