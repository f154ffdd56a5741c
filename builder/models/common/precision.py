"""Which weights of a bfloat16 engine are bfloat16, and which parts compute in fp32 all the same.

Activations, residual stream and caches are bfloat16, and products sum in fp32. Norms and softmax
(inside), rotary angles and their products, router, weights of an indexer's heads and logits are
fp32: rounded to bfloat16, scores of experts and logits of tokens would tie. The head's weight is
fp32 on a CPU and bfloat16 on a GPU.
"""

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.weight import stays_fp32
from mtpbuild.runtime.contract.manifest import FloatType

FLOATS: dict[FloatType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Make a weight without values, in torch's default dtype unless another is given."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def set_dtype(model: nn.Module, dtype: torch.dtype, for_gpu: bool = False) -> None:
    """Change the weights' dtype, without values, except for routers, and for heads on a CPU.

    A CPU has no product of bfloat16 that returns its fp32 sums unrounded (`matmul_wide`).
    """
    for name, weight in model.named_parameters():
        wide = stays_fp32(name, for_gpu)
        if weight.is_floating_point() and weight.dtype != dtype and not wide:
            weight.data = torch.empty_like(weight, dtype=dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast x unless it already has the dtype, so that fp32 graphs have no casts."""
    return x if x.dtype == dtype else x.to(dtype)
