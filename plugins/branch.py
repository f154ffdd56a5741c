"""Conditional branches in graphs, so that a step skips work that none of its requests needs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Branch = Callable[..., tuple[Tensor, ...]]


def when(
    predicate: Tensor, yes: Branch, no: Branch, operands: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Run `yes(*operands)` if a bool scalar is true, else `no(*operands)`; in ONNX, an If.

    Both must return tensors of the same shapes and types, and neither may return an operand.
    """
    if not torch.compiler.is_exporting():
        return (yes if bool(predicate) else no)(*operands)
    tensors, form = tree_flatten(operands)

    def flat(branch: Branch) -> Branch:
        return lambda *values: branch(*tree_unflatten(values, form))

    # torch.cond would let Dynamo search both branches for captured tensors. There are none, and the
    # search takes longer than tracing.
    return torch.ops.higher_order.cond(predicate, flat(yes), flat(no), tuple(tensors))
