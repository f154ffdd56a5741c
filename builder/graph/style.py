"""The form of graph that a target compiles."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from mtpbuild.builder.graph.pipelines import PLAIN, Pipeline

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import CacheType, FloatType


class Sizes(StrEnum):
    """The sizes that vary at run time; the length of a prompt's chunk always does."""

    IN_USE = "in use"  # every program takes the slots in use and the cache rows in use
    WHOLE_CACHES = "whole caches"  # a step takes the slots in use and all rows of their caches
    FIXED = "fixed"  # always all slots and all rows: one CUDA graph, or one TensorRT profile


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
    pipeline: Pipeline = PLAIN
    overlap: bool = False  # a step is launched before the tokens of the previous one are read
    formats: tuple[str, ...] = ()  # number formats whose weights are not dequantised
    rounds_to: str | None = None  # the one that quantised weights in other formats get, if any
    dtype: "FloatType" = "float32"  # of other weights, of caches and hidden states
    cache_dtype: "CacheType | None" = None  # of caches, if it differs from dtype

    @property
    def whole_caches(self) -> bool:
        """Return whether a step takes all rows of the caches."""
        return self.sizes is not Sizes.IN_USE

    @property
    def fixed(self) -> bool:
        """Return whether every program takes all slots and all rows."""
        return self.sizes is Sizes.FIXED

    @property
    def packs_weights(self) -> bool:
        """Return whether weights are packed for the CPU's library of kernels."""
        return self.pipeline.cpu_library

    @property
    def joins_experts(self) -> bool:
        """Return whether shared experts may be stacked with routed ones, for one kernel."""
        return "moe" in self.pipeline.facets

    @property
    def accepts_by_kernel(self) -> bool:
        """Return whether a kernel decides which drafts are accepted."""
        return "accept_mixed" in self.pipeline.facets

    @property
    def penalties(self) -> bool:
        """Return whether requests may have penalties.

        On a GPU the host writes nothing between two steps, so every request would pay for them.
        """
        return not self.for_gpu
