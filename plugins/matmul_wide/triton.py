"""matmul_wide in Triton: the kernel of `matmul_scaled`, with a weight that has no scales."""

import torch
from torch import Tensor

from mtpbuild.plugins.launch import Launches, run_launches
from mtpbuild.plugins.matmul_scaled.triton import product_launches
from mtpbuild.plugins.matmul_wide.op import matmul_wide


def matmul_wide_launches(x: Tensor, weight: Tensor) -> Launches:
    """Return the op's launch and the sum over its splits."""
    return product_launches(x, weight, dtype=torch.float32)


matmul_wide_triton = run_launches(matmul_wide, matmul_wide_launches, "x")
