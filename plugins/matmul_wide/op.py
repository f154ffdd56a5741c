"""matmul_wide: x @ W in fp32 for a bf16 head, as logits that are rounded to bf16 often tie."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import define


@define(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[-1], dtype=torch.float32))
def matmul_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [.., K] by a weight [K, N] of the same type; the result [.., N] is fp32."""
    return x.float() @ weight.float()
