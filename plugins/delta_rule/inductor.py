"""delta_rule in AOTInductor: a loop over a prompt's tokens; a step's few stand one by one."""

import torch
from torch import Tensor

from mtpbuild.plugins.delta_rule.op import delta_rule, inputs, step


def delta_rule_inductor(
    mixed: Tensor, ba: Tensor, rate: Tensor, bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    tokens = mixed.shape[1]
    if isinstance(tokens, int):
        outputs, after = delta_rule._init_fn(mixed, ba, rate, bias, state)
        return outputs, after
    given = inputs(mixed, ba, rate, bias, state)
    (B, H, _, V), count = state.shape, ba.shape[1]

    def more(t: Tensor, *held: Tensor) -> Tensor:
        return t < count

    def body(t: Tensor, state: Tensor, found: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        own = (each.index_select(1, t[None])[:, 0] for each in given)
        state, o = step(state, *own)
        return t + 1, state, found.index_copy(1, t[None], o[:, None])

    first = torch.zeros((), dtype=torch.int64)
    carried = first, state.clone(), mixed.new_zeros((B, count, H, V))
    _, after, found = torch.ops.higher_order.while_loop(more, body, carried, tuple(given))
    return found, after
