"""delta_rule in AOTInductor: a loop over a prompt's tokens; a step's few tokens are unrolled."""

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
    B, H, K, V = state.shape
    count = ba.shape[1]
    q, k, v, decay, beta = inputs(mixed, ba, rate, bias, state)
    # Joined into one tensor, which is a copy: if a loop's operand is a view, AOTInductor (torch
    # 2.13) frees its handle in the first iteration and reads it in the second.
    joined = torch.cat([q, k, v, decay[..., None], beta[..., None]], dim=-1)

    def more(t: Tensor, *carried: Tensor) -> Tensor:
        return t < count

    def body(t: Tensor, state: Tensor, outputs: Tensor, joined: Tensor) -> tuple[Tensor, ...]:
        token_inputs = joined.index_select(1, t[None])[:, 0]
        q, k, v, decay, beta = token_inputs.split([K, K, V, 1, 1], dim=-1)
        state, o = step(state, q, k, v, decay[..., 0], beta[..., 0])
        return t + 1, state, outputs.index_copy(1, t[None], o[:, None])

    first = torch.zeros((), dtype=torch.int64)
    carried = first, state.clone(), mixed.new_zeros((B, count, H, V))
    _, after, outputs = torch.ops.higher_order.while_loop(more, body, carried, (joined,))
    return outputs, after
