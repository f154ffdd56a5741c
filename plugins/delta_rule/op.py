"""delta_rule and delta_advance: the gated delta rule, token by token (arXiv:2412.06464).

Shapes: B slots, T tokens, G heads of queries and keys of width K, H heads of values of width V. A
head of queries and keys serves H / G adjacent value heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define

EPSILON = 1e-6  # added to the squared lengths by which queries and keys are normalised


@define(
    lambda mixed, state: (
        mixed.new_empty(*mixed.shape[:2], state.shape[1], state.shape[3]),
        torch.empty_like(state),
    ),
    # The pass `fuse_neighbours` sets it to 0 if nothing reads the state.
    Node("DeltaRule", attributes=lambda known: {"keeps": 1}),
)
def delta_rule(
    mixed: Tensor, ba: Tensor, rate: Tensor, bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Update a state [B, H, K, V] with T tokens and read it after each of them; all is fp32.

    mixed [B, T, 2 G K + H V] contains queries, keys and values; ba [B, T, 2 H] is b, then a; rate
    and bias are [H]. For each value head and token, with q and k divided by their lengths:

        S = exp(-rate softplus(a + bias)) S
        S = S + k sigmoid(b) (v - S^T k)^T
        o = S^T q / sqrt(K)

    Returns o [B, T, H, V] and the state after all tokens.
    """
    q, k, v, decay, beta = inputs(mixed, ba, rate, bias, state)
    outputs = []
    for t in range(mixed.shape[1]):
        state, o = step(state, q[:, t], k[:, t], v[:, t], decay[:, t], beta[:, t])
        outputs.append(o)
    return torch.stack(outputs, dim=1), state.clone()


@define(lambda state: torch.empty_like(state), Node("DeltaAdvance"))
def delta_advance(
    mixed: Tensor, ba: Tensor, rate: Tensor, bias: Tensor, state: Tensor, n: Tensor
) -> Tensor:
    """Return the state [B, H, K, V] of `delta_rule` after the first n [B] of the T tokens.

    Tokens from n on multiply the state by 1 and add 0, so n = 0 leaves it unchanged to the bit.
    """
    q, k, v, decay, beta = inputs(mixed, ba, rate, bias, state)
    for t in range(mixed.shape[1]):
        stays = (t < n)[:, None]
        kept_decay = torch.where(stays, decay[:, t], 1.0)
        kept_beta = torch.where(stays, beta[:, t], 0.0)
        state, _ = step(state, q[:, t], k[:, t], v[:, t], kept_decay, kept_beta)
    return state.clone()


def inputs(mixed: Tensor, ba: Tensor, rate: Tensor, bias: Tensor, state: Tensor) -> list[Tensor]:
    """Return q and k [B, T, H, K], v [B, T, H, V], decay and beta [B, T, H]."""
    H, K, V = state.shape[1:]
    keys = (mixed.shape[-1] - H * V) // 2
    q, k, v = mixed.split([keys, keys, H * V], dim=-1)
    heads = [rows.unflatten(-1, (keys // K, K)) for rows in (q, k)]
    lengths = [torch.rsqrt(rows.square().sum(-1, keepdim=True) + EPSILON) for rows in heads]
    q, k = (
        (rows * length).repeat_interleave(H * K // keys, dim=2)
        for rows, length in zip(heads, lengths, strict=True)
    )
    b, a = ba.split(H, dim=-1)
    decay = (-rate * F.softplus(a + bias)).exp()
    return [q * K**-0.5, k, v.unflatten(-1, (H, V)), decay, b.sigmoid()]


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the new state and output [B, H, V] for one token: q, k [B, H, K], decay [B, H]."""
    state = state * decay[..., None, None]
    error = v - (state * k[..., None]).sum(-2)
    state = state + k[..., None] * (beta[..., None] * error)[..., None, :]
    return state, (state * q[..., None]).sum(-2)
