"""A share is the part of a model that one rank holds (spec/deepseek-v3.md section 5)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpbuild.runtime.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor


ALONE = Ranks()


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint and the shape that the configuration demands."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None  # that ranks split; None: each holds all of it
    routed: bool = False  # a routed expert's: groups of ranks hold it, split by their columns


@dataclass(frozen=True)
class Share:
    """One rank of several. Its number matters to weights alone: all ranks have the same graph."""

    ranks: Ranks = ALONE
    rank: int = 0

    def experts(self, count: int) -> range:
        """Ids of the routed experts that it holds of `count`, whole or a part of each.

        Groups are in the order of TensorRT-LLM: neighbours are in different ones.
        """
        size, group = count // self.ranks.ep, self.rank % self.ranks.ep
        return range(group * size, (group + 1) * size)

    def cut(self, source: Source, tensor: "Tensor") -> "Tensor":
        """This rank's part of a checkpoint's tensor, which must be among those that it holds."""
        parts, part = self.ranks.parts, self.rank
        if source.routed:
            parts, part = self.ranks.tp // self.ranks.ep, self.rank // self.ranks.ep
        if source.axis is None or parts == 1:
            return tensor
        size = tensor.shape[source.axis] // parts
        return tensor.narrow(source.axis, part * size, size)


WHOLE = Share()
