"""A branch in the graph: what no request of a step asks for is not computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Branch = Callable[..., tuple[Tensor, ...]]


def when(
    predicate: Tensor, yes: Branch, no: Branch, operands: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """`yes(*operands)` or `no(*operands)`, by a bool scalar; ONNX's If.

    Both give tensors of the same shapes and types, none of which is an operand itself.
    """
    if torch.compiler.is_exporting():
        return torch.cond(predicate, yes, no, operands)
    return (yes if bool(predicate) else no)(*operands)
