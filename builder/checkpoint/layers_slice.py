"""Use some layers of a large checkpoint as a model, to try it on a small machine."""

import re
from dataclasses import dataclass

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.runtime.errors import UsageError

LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")


@dataclass(frozen=True)
class LayersSlice:
    """Main layers `first` to `last`, both included, and all MTP modules."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def of(self, c: ModelConfig) -> ModelConfig:
        """Return the slice's configuration; raise UsageError if the model lacks these layers."""
        if not 0 <= self.first <= self.last < c.num_hidden_layers:
            raise UsageError(f"--layers {self} is outside 0-{c.num_hidden_layers - 1}")
        return c.sliced(self.first, self.count)

    def rename(self, name: str, layers: int) -> str | None:
        """Return a tensor's name in the slice, or None if the slice lacks it.

        layers: the number of main layers of the checkpoint.
        """
        match = LAYER.fullmatch(name)
        if match is None:
            return name
        layer = int(match[2])
        if layer < layers and not self.first <= layer <= self.last:
            return None
        shift = self.first if layer < layers else layers - self.count
        return f"{match[1]}{layer - shift}{match[3]}"


def parse_layers(text: str) -> LayersSlice:
    """Parse a range such as `0-3`; raise UsageError for anything else."""
    match = re.fullmatch(r"(\d{1,6})-(\d{1,6})", text)
    if match is None:
        raise UsageError(f"--layers {text!r} is not a range such as 0-3")
    return LayersSlice(int(match[1]), int(match[2]))
