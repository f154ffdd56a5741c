"""matmul_wide in Triton: the kernel of `matmul_scaled`, with a weight that has no scales."""

from torch import Tensor

from mtpbuild.plugins.launch import Launches, by_kernels
from mtpbuild.plugins.matmul_scaled.triton import product_launch
from mtpbuild.plugins.matmul_wide.op import matmul_wide


def matmul_wide_launches(x: Tensor, weight: Tensor) -> Launches:
    """Return the op's launch; the caller sums its result [splits, rows, N] over the splits."""
    launch = product_launch(x, weight, None, None)
    return Launches((launch,), launch.outputs[0])


@by_kernels(matmul_wide)
def matmul_wide_triton(x: Tensor, weight: Tensor) -> Tensor:
    """Run matmul_wide on a GPU."""
    parts = matmul_wide_launches(x.contiguous(), weight).run()
    return parts.sum(0).unflatten(0, x.shape[:-1])
