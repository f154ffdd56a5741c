"""A view of a checkpoint in other number formats, which quantises weights as they are read."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from safetensors import safe_open

from mtpbuild.builder.formats import FORMATS, Entry, Format, refuse_too_large, refuse_too_small
from mtpbuild.builder.lazy_torch import Tensor, torch
from mtpbuild.builder.models import ModelConfig
from mtpbuild.builder.models.common.weight import StoredTensor
from mtpbuild.builder.weights.checkpoint import (
    PIECE,
    Checkpoint,
    Loss,
    choose_read_format,
    encode_anew,
)
from mtpbuild.builder.weights.scheme import Scheme

Parts: TypeAlias = "dict[str, Tensor]"  # by suffix


@dataclass(frozen=True)
class QuantisedView:
    """The checkpoint that `mtpbuild quantize` would write, without writing it.

    Each read of a weight encodes it again, some rows at a time.
    """

    source: Checkpoint
    tensors: Mapping[str, Entry]
    formats: Mapping[str, Format | None]  # by weight; None: it is not quantised
    unfit: tuple[str, ...]  # weights whose columns do not split into their format's blocks
    amaxes: dict[str, float] = field(default_factory=dict)  # by weight; each is computed once
    # By weight: a safetensors file with its parts, where texts have said how to round it.
    calibrated: Mapping[str, Path] = field(default_factory=dict)
    losses: dict[str, Loss] = field(default_factory=dict)  # as of a checkpoint

    def format(self, name: str) -> Format | None:
        return self.formats[name]

    def read(self, name: str) -> Tensor:
        if (format := self.formats[name]) is not None:
            return format.decode(self.parts(name))
        weight = self.source.read(name)
        return weight if self.source.format(name) is None else weight.bfloat16().float()

    def tensor(self, name: str) -> Tensor:
        """Return a weight that is not quantised here; a quantised source is rounded to bf16."""
        weight = self.source.read(name)  # refuses NaN and Inf
        return self.source.tensor(name) if self.source.format(name) is None else weight.bfloat16()

    def parts(self, name: str) -> Parts:
        if name in self.calibrated:
            return self.read_calibrated_parts(name)
        return self.collect(name, (parts for _, parts in self.encoded(name)))

    def rows(self, name: str) -> Iterator[Tensor]:
        """Read a weight as `read` does, but yield some rows at a time."""
        if self.formats[name] is None and self.source.format(name) is None:
            return self.source.rows(name)
        return iter(self.read(name).split(PIECE))

    def read_engine_parts(self, name: str, engine_format: Format | None = None) -> Parts:
        """Do what a checkpoint does for its weights."""
        format = self.formats[name]
        assert format is not None
        if engine_format is not None and choose_read_format(format, engine_format) is not format:
            return encode_anew(name, self.read(name), engine_format, self.losses)
        return self.parts(name)

    def collect(self, name: str, pieces: Iterable[Parts]) -> Parts:
        """Join the parts of pieces of a weight's rows.

        Pieces are copied into place at once: keeping them fragments the heap, and joining them at
        the end takes twice the memory.
        """
        whole: Parts = {}
        at = dict[str, int]()
        for piece in pieces:
            for suffix, rows in piece.items():
                if rows.dim() == 0:  # a scale of the whole weight, the same in all pieces
                    whole[suffix] = rows
                    continue
                if suffix not in whole:
                    whole[suffix] = rows.new_empty(self.tensors[name + suffix].shape)
                start = at.get(suffix, 0)
                at[suffix] = start + len(rows)
                whole[suffix][start : at[suffix]] = rows
        return whole

    def encoded(self, name: str) -> Iterator[tuple[Tensor, Parts]]:
        """Yield pieces of a quantised weight's rows in fp32, with the parts that encode them."""
        format = self.formats[name]
        assert format is not None
        amax = torch.tensor(self.find_group_amax(name)) if format.needs_amax else None
        known, start, sums = self.read_calibrated_parts(name), 0, torch.zeros(2)
        for rows in self.source.rows(name):
            if known:
                yield rows, {n: part[start : start + len(rows)] for n, part in known.items()}
                start += len(rows)
                continue
            refuse_too_large(format, name, rows)
            sums = sums + format.sum_coarse(rows)
            yield rows, format.encode(rows, amax)
        refuse_too_small(format, name, sums)

    def read_calibrated_parts(self, name: str) -> Parts:
        """Read the parts of a calibrated weight; {} if it is none."""
        format = self.formats[name]
        if format is None or name not in self.calibrated:
            return {}
        with safe_open(self.calibrated[name], framework="pt") as file:
            return {suffix: file.get_tensor(name + suffix) for suffix in format.suffixes}

    def find_group_amax(self, name: str) -> float:
        """Return a weight's largest magnitude; gate and up share theirs, as ModelOpt joins them."""
        gate, up = "gate_proj.weight", "up_proj.weight"
        names = {name, name.replace(gate, up), name.replace(up, gate)}
        for each in names - self.amaxes.keys():
            self.amaxes[each] = max(rows.abs().max().item() for rows in self.source.rows(each))
        return max(self.amaxes[each] for each in names)


def requantise(
    checkpoint: Checkpoint, config: ModelConfig, scheme: Scheme, weights: Iterable[StoredTensor]
) -> QuantisedView:
    """Return a view of these weights of a checked checkpoint, quantised as `scheme` says."""
    formats, unfit, tensors = dict[str, Format | None](), list[str](), dict[str, Entry]()
    for stored in weights:
        name = stored.name
        format = formats[name] = format_by(scheme, config, stored)
        if format is None and scheme.wanted(config, name) is not None:
            unfit.append(name)
        if format is not None:
            tensors |= {name + suffix: e for suffix, e in format.parts(stored.shape).items()}
            continue
        # A weight that is dequantised is bf16.
        dtype = "BF16" if checkpoint.format(name) else checkpoint.tensors[name].dtype
        tensors[name] = Entry(dtype, stored.shape)
    return QuantisedView(checkpoint, tensors, formats, tuple(unfit))


def format_by(scheme: Scheme, config: ModelConfig, stored: StoredTensor) -> Format | None:
    """Return the format that a scheme gives a weight; None if the weight stays as it is."""
    wanted = scheme.wanted(config, stored.name)
    format = None if wanted is None else FORMATS[wanted]
    return format if format is not None and format.fits(stored.shape) else None
