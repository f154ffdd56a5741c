"""The form in which a target wants its graphs."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import FloatType


class Sizes(StrEnum):
    """Says which sizes vary at run time; the length of a prompt's chunk always does."""

    IN_USE = "in use"  # every program takes the slots in use, and the cache rows in use
    WHOLE_CACHES = "whole caches"  # a step takes the slots in use, and all rows of their caches
    FIXED = "fixed"  # all slots and all rows, always: one CUDA graph, or one TensorRT profile


class Kernels(IntEnum):
    """Says which ops are kernels of ours; each level includes the levels before it."""

    NONE = 0
    STEP = 1  # attention, experts and wide products of a step
    ACCEPTANCE = 2  # mixed acceptance and the drafts' distributions
    FUSED = 3  # what stands between a step's products: routing, norms, rotation


class Attends(StrEnum):
    """Names kinds of attention, for which a target may have kernels on a GPU."""

    LATENT = "latent attention"
    CHOSEN = "attention to chosen rows (DSA)"
    GROUPED = "grouped-query attention"


@dataclass(frozen=True)
class GraphStyle:
    """Says how a target wants its programs traced; the defaults are those of a CPU."""

    for_gpu: bool = False
    sizes: Sizes = Sizes.IN_USE
    kernels: Kernels = Kernels.NONE
    cpu_kernels: bool = False  # weights are multiplied by the CPU's library of kernels
    overlap: bool = False  # a step is launched before the last one's tokens are read
    dtype: "FloatType" = "float32"  # of weights, caches and hidden states
    cache_dtype: "FloatType | None" = None  # of caches, if it is another

    @property
    def whole_caches(self) -> bool:
        """Tells whether a step takes all rows of the caches."""
        return self.sizes is not Sizes.IN_USE

    @property
    def fixed(self) -> bool:
        """Tells whether every program takes all slots and all rows."""
        return self.sizes is Sizes.FIXED

    @property
    def fused(self) -> bool:
        """Tells whether what stands between a step's products has kernels of ours."""
        return self.kernels is Kernels.FUSED

    @property
    def penalties(self) -> bool:
        """Tells whether requests may have penalties.

        On a GPU the host writes nothing between two steps, and every request would pay for them.
        """
        return not self.for_gpu
