"""Products with plain weights in Triton: the kernel of `matmul_scaled`, without scales."""

import torch
from torch import Tensor

from mtpbuild.plugins.launch import Launches, by_kernels, run_launches
from mtpbuild.plugins.matmul_scaled.triton import product_launch, product_launches
from mtpbuild.plugins.matmul_wide.op import matmul_wide


def matmul_wide_launches(x: Tensor, weight: Tensor) -> Launches:
    """Return the op's launch and the sum over its splits."""
    return product_launches(x, weight, dtype=torch.float32)


matmul_wide_triton = run_launches(matmul_wide, matmul_wide_launches, "x")


@by_kernels(matmul_wide, "matmul_parts")
def matmul_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply like `matmul_wide`, but return the partial sums [splits, .., N]."""
    (parts,) = product_launch(x.contiguous(), weight).run()
    return parts.unflatten(1, x.shape[:-1])
