"""soft_cap: bound logits smoothly."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import Node, define


@define(lambda x: torch.empty_like(x), Node("SoftCap"))
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Compute cap * tanh(x / cap)."""
    return (x / cap).tanh() * cap
