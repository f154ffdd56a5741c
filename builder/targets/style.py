"""The form of graph that a target compiles."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import FloatType


class Sizes(StrEnum):
    """The sizes that vary at run time; the length of a prompt's chunk always does."""

    IN_USE = "in use"  # every program takes the slots in use and the cache rows in use
    WHOLE_CACHES = "whole caches"  # a step takes the slots in use and all rows of their caches
    FIXED = "fixed"  # always all slots and all rows: one CUDA graph, or one TensorRT profile


class Kernels(IntEnum):
    """The ops that have kernels of ours; each level includes the levels before it."""

    NONE = 0
    STEP = 1  # attention, experts and wide products of a step
    ACCEPTANCE = 2  # mixed acceptance and the drafts' distributions
    FUSED = 3  # the ops between a step's products: routing, norms, rotation


class Attends(StrEnum):
    """The kinds of attention for which a target may have GPU kernels."""

    LATENT = "latent attention"
    CHOSEN = "attention to chosen rows (DSA)"
    GROUPED = "grouped-query attention"


@dataclass(frozen=True)
class GraphStyle:
    """The form in which a target wants its programs traced; the defaults are for a CPU."""

    for_gpu: bool = False
    sizes: Sizes = Sizes.IN_USE
    kernels: Kernels = Kernels.NONE
    cpu_kernels: bool = False  # the CPU's library of kernels multiplies weights
    overlap: bool = False  # a step is launched before the tokens of the previous one are read
    formats: tuple[str, ...] = ()  # number formats that graphs compute with as they are
    dtype: "FloatType" = "float32"  # of other weights, caches and hidden states
    cache_dtype: "FloatType | None" = None  # of caches, if it differs from dtype

    @property
    def whole_caches(self) -> bool:
        """Return whether a step takes all rows of the caches."""
        return self.sizes is not Sizes.IN_USE

    @property
    def fixed(self) -> bool:
        """Return whether every program takes all slots and all rows."""
        return self.sizes is Sizes.FIXED

    @property
    def fused(self) -> bool:
        """Return whether the ops between a step's products have kernels of ours."""
        return self.kernels is Kernels.FUSED

    @property
    def penalties(self) -> bool:
        """Return whether requests may have penalties.

        On a GPU the host writes nothing between two steps, so every request would pay for them.
        """
        return not self.for_gpu
