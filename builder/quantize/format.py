"""A number format of weights stores tensors, and goes in both directions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One stored tensor: its dtype as safetensors names it, and its shape."""

    dtype: str
    shape: Shape


class Format(Protocol):
    """Weights are [out, in]. Parts are keyed by what follows `X.weight` in their names."""

    name: str

    def fits(self, shape: Shape) -> bool:
        """Tell whether a weight of this shape splits into the format's blocks."""
        ...

    def parts(self, shape: Shape) -> dict[str, Part]:
        """List what is stored for a weight of this shape; the weight's own part is `""`."""
        ...

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight in fp32: the format's product, rounded once."""
        ...

    def encode(self, weight: Tensor, amax: Tensor) -> dict[str, Tensor]:
        """fp32 weight -> parts; amax (0-dim): its largest magnitude, or that of its group."""
        ...
