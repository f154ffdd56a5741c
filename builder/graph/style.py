"""The form of graph that a target compiles."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from mtpbuild.builder.graph.pipeline import TRACED_THROUGH, Pipeline

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import CacheType, FloatType


class Attends(StrEnum):
    """The kinds of attention for which a target may have GPU kernels."""

    LATENT = "latent attention"
    CHOSEN = "attention to chosen rows (DSA)"
    COMPRESSED = "attention to compressed rows"
    GROUPED = "grouped-query attention"


@dataclass(frozen=True)
class GraphStyle:
    """The form in which a target wants its programs traced; the defaults are for a CPU.

    Of the sizes, the length of a prompt's chunk always varies at run time.
    """

    for_gpu: bool = False
    whole_caches: bool = False  # a step takes all rows of the caches, not those in use alone
    all_slots: bool = False  # every program takes all slots and all rows: one CUDA graph
    pipeline: Pipeline = TRACED_THROUGH
    overlap: bool = False  # a step is launched before the tokens of the previous one are read
    formats: tuple[str, ...] = ()  # number formats whose weights are not dequantised
    rounds_to: str | None = None  # the one that quantised weights in other formats get, if any
    dtype: "FloatType" = "float32"  # of other weights, of caches and hidden states
    cache_dtype: "CacheType | None" = None  # of caches, if it differs from dtype
    embeds_weights: bool = False  # programs hold their weights: engines have no weights file
    ranks_share_programs: bool = True  # all ranks run the same lowered programs

    @property
    def packs_weights(self) -> bool:
        """Whether weights are packed for the CPU's library of kernels."""
        return self.pipeline.cpu_library

    @property
    def joins_experts(self) -> bool:
        """Whether shared experts may be stacked with routed ones, for one kernel."""
        return "moe" in self.pipeline.facets

    @property
    def accepts_by_kernel(self) -> bool:
        """Whether a kernel decides which drafts are accepted."""
        return "accept_mixed" in self.pipeline.facets

    @property
    def penalties(self) -> bool:
        """Whether requests may have penalties.

        On a GPU the host writes nothing between two steps, so every request would pay for them.
        """
        return not self.for_gpu
