"""gelu_gate: x * gelu(z), with gelu by its approximation with tanh."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define


@define(lambda z: torch.empty_like(z), Node("Gate", attributes=lambda known: {"gelu": 1}))
def gelu_gate(x: Tensor, z: Tensor) -> Tensor:
    """Compute x * gelu(z) of tensors of one shape."""
    return x * F.gelu(z, approximate="tanh")


def apply_gate(gate: Tensor, up: Tensor, gelu: bool, limit: float = 0.0) -> Tensor:
    """Return silu(gate) * up, or gelu(gate) * up.

    limit: gates are at most so large, ups within it and its negative; 0: no limit.
    """
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gelu_gate(up, gate) if gelu else F.silu(gate) * up
