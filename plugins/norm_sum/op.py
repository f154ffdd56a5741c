"""norm_sum: add a normed branch to the residual stream."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define


@define(lambda x: torch.empty_like(x), Node("NormSum", renamed={"eps": "epsilon"}))
def norm_sum(x: Tensor, y: Tensor, weight: Tensor, factor: Tensor | None, eps: float) -> Tensor:
    """Compute (x + rms_norm(y)) * factor of x and y [.., E]; weight [E], factor [1]."""
    total = x + F.rms_norm(y, weight.shape, weight, eps)
    return total if factor is None else total * factor
