"""matmul_wide: x @ W in fp32, for a head that is held in bf16: rounded logits would tie."""

import torch
from torch import Tensor


@torch.library.custom_op("mtpbuild::matmul_wide", mutates_args=())
def matmul_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [.., K] by a weight [K, N] of its type: the sums are fp32, and stay so."""
    return x.float() @ weight.float()


matmul_wide.register_fake(
    lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[-1], dtype=torch.float32)
)
