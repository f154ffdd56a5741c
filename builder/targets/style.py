"""How a target wants its graphs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import FloatType


@dataclass(frozen=True)
class GraphStyle:
    """How a target wants its programs traced; by default all that varies at run time is open.

    A fixed graph computes every slot of every step, over caches of their full size: it is one CUDA
    graph and one TensorRT profile. A prompt's chunk varies in any style.
    """

    fixed: bool = False
    whole_caches: bool = False  # a step takes caches at full size, not the rows in use
    step_kernels: bool = False  # a step's ops have kernels
    all_kernels: bool = False  # so have the ops of prompts and of mixed acceptance
    fused: bool = False  # so has what stands between a step's products: routing, norms, rotation
    shared_trunk: bool = False  # it is a program of its own, which prompts and all steps run
    spare_windows: int = 1  # windows of rows behind max_seq_len: 2 where steps overlap
    dtype: "FloatType" = "float32"  # of weights, caches and hidden states

    @property
    def for_gpu(self) -> bool:
        """Whether graphs are for a GPU: the CPU's alone take the rows in use, not whole caches."""
        return self.whole_caches

    @property
    def penalties(self) -> bool:
        """Whether requests may have penalties: without branches all would pay for them."""
        return not self.for_gpu
