"""Reads a Hugging Face safetensors checkpoint tensor by tensor, checked against the table."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtpbuild.builder.model.config import ModelConfig
from mtpbuild.builder.model.weights import Source, Weight, duplicates, weight_table
from mtpbuild.runtime.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"BF16", "F16", "F32"}


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder: name -> file, shape and dtype; bytes are read when asked for."""

    folder: Path
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def read(self, name: str) -> Tensor:
        """One tensor in fp32; raises CheckpointError if it holds NaN or Inf."""
        try:
            with safe_open(self.files[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name).float()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.files[name]}: can't read {name} ({error})") from None
        if tensor.numel() and not bool(tensor.abs().max().isfinite()):  # max keeps a NaN
            raise CheckpointError(f"{self.files[name]}: tensor {name} holds NaN or Inf")
        return tensor

    def check(self, config: ModelConfig) -> list[Weight]:
        """The table of this checkpoint's weights, after every name, shape and dtype was checked.

        Raises CheckpointError that names missing, left-over or wrong-shaped tensors.
        """
        table, same = weight_table(config), duplicates(config)
        wanted = {source.name: source for weight in table for source in weight.sources}
        self._refuse(set(wanted) - set(self.files), "missing tensor")
        for source in wanted.values():
            self._check_tensor(source)
        left = {name for name in self.files if name not in wanted and name not in same}
        left = {name for name in left if not name.endswith(".rotary_emb.inv_freq")}
        self._refuse(left, "tensor that this architecture does not have:")
        for name in sorted(set(same) & set(self.files) - set(wanted)):
            if not torch.equal(self.read(name), self.read(same[name])):
                raise CheckpointError(
                    f"{self.folder}: {name} differs from {same[name]}; MTP modules share it"
                )
        return table

    def _refuse(self, names: Iterable[str], what: str) -> None:
        first, *rest = [*sorted(names), None]
        if first is not None:
            more = f" (and {len(rest) - 1} more)" if len(rest) > 1 else ""
            raise CheckpointError(f"{self.folder}: {what} {first}{more}")

    def _check_tensor(self, source: Source) -> None:
        where = f"{self.files[source.name]}: tensor {source.name}"
        if self.dtypes[source.name] not in DTYPES:
            raise CheckpointError(
                f"{where} is {self.dtypes[source.name]}; supported: {', '.join(sorted(DTYPES))}"
            )
        if self.shapes[source.name] != source.shape:
            raise CheckpointError(
                f"{where} has shape {list(self.shapes[source.name])}, "
                f"config.json makes it {list(source.shape)}"
            )


def open_checkpoint(folder: Path) -> Checkpoint:
    """List the tensors of `model.safetensors` or of the shards that the index names."""
    files = _shards(folder)
    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for path in sorted(set(files)):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name in where:
                        raise CheckpointError(f"{path}: tensor {name} is in {where[name]} too")
                    part = file.get_slice(name)
                    where[name] = path
                    shapes[name], dtypes[name] = tuple(part.get_shape()), part.get_dtype()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    return Checkpoint(folder, where, shapes, dtypes)


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        shards = [folder / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: no usable weight_map ({error!r})") from None
    for name, shard in zip(names, shards, strict=True):
        if Path(name).name != name:
            raise CheckpointError(f"{index}: shard {name!r} is not a file name")
        if not os.path.isfile(shard):  # never raises, however odd the name
            raise CheckpointError(f"{folder}: shard {name} named by {INDEX} is missing")
    return shards


def stream_weights(checkpoint: Checkpoint, table: list[Weight]) -> Iterator[tuple[str, Tensor]]:
    """Each weight of the table in its program's layout, fp32, contiguous; one at a time."""
    for weight in table:
        tensors = [checkpoint.read(source.name) for source in weight.sources]
        yield weight.name, weight.transform(*tensors).contiguous()
