"""A branch in the graph: what no request of a step asks for is not computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Branch = Callable[..., tuple[Tensor, ...]]


def when(
    predicate: Tensor, yes: Branch, no: Branch, operands: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """`yes(*operands)` or `no(*operands)`, by a bool scalar; ONNX's If.

    Both give tensors of the same shapes and types, none of which is an operand itself.
    """
    if not torch.compiler.is_exporting():
        return (yes if bool(predicate) else no)(*operands)
    tensors, form = tree_flatten(operands)

    def flat(branch: Branch) -> Branch:
        return lambda *given: branch(*tree_unflatten(given, form))

    # torch.cond would have Dynamo look for what a branch takes besides its operands. Nothing: and
    # looking for it takes longer than tracing both.
    return torch.ops.higher_order.cond(predicate, flat(yes), flat(no), tuple(tensors))
