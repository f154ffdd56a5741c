"""bfloat16 in the model: which weights are held in it, what is computed in fp32 all the same.

Activations, residual stream and caches are bfloat16, and products sum in fp32. Norms (inside),
rotary angles and their products, router, softmax (inside) and logits are fp32: rounded to
bfloat16, the scores of experts and the logits of tokens tie (spec/deepseek-v3.md sections 2, 8).
The head's weight is fp32 on a CPU and bfloat16 on a GPU.
"""

import torch
from torch import Tensor, nn

from mtpbuild.runtime.contract.manifest import FloatType

FLOATS: dict[FloatType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A weight without values, in torch's default type unless another is given."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def hold_in(model: nn.Module, dtype: torch.dtype, for_gpu: bool = False) -> None:
    """Give the weights that type, without values, but for routers, and heads on a CPU.

    A CPU has no product of bfloat16 with fp32 sums that stay so (`matmul_wide`).
    """
    for name, weight in model.named_parameters():
        head = name.endswith(("lm_head", "draft_head"))
        stays_wide = (head and not for_gpu) or ".gate." in name
        if weight.is_floating_point() and weight.dtype != dtype and not stays_wide:
            weight.data = torch.empty_like(weight, dtype=dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in that type; no operator where it is already, so that graphs of fp32 have none."""
    return x if x.dtype == dtype else x.to(dtype)
