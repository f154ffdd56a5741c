"""Penalties and bias: a request's edits of the model's logits, in vLLM's order.

vLLM (v1/sample/sampler.py) adds `logit_bias` first. Then the repetition penalty divides what is
positive, and multiplies what is negative, of each token that prompt or output contains. Then
`frequency_penalty` is subtracted for each time that the output contains the token, and
`presence_penalty` once. Temperature and filters come behind.

A row is edited as if the tokens before it had been emitted, drafts or not: so what is accepted has
been judged by the logits that a step without drafts would have seen.
"""

import torch
from torch import Tensor

from mtpbuild.plugins.asked import Asked
from mtpbuild.plugins.branch import when

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
# The controls that penalties read.
READ = (*PENALTIES, "prompt_length", "bias_ids", "bias_values", "penalised")


def penalised(
    logits: Tensor, history: Tensor, lengths: Tensor, ahead: tuple[Tensor, ...], asked: Asked
) -> Tensor:
    """Edit logits [B, R, V] as the slots' requests ask; nothing is computed if none asks.

    history [B, S]: each slot's tokens, of which the first `lengths` [B] count; ahead: the tokens
    behind them, the newest and drafts, in pieces of together [B, A], A >= R. The last row has seen
    them all, each row before it one less.
    """
    edits = {name: asked[name] for name in READ}
    operands = (logits, history, lengths, ahead, edits)
    return when(asked["penalised"].any(), _penalised, unchanged, operands)[0]


def unchanged(logits: Tensor, *others: object) -> tuple[Tensor, ...]:
    """Is the branch in which no request asks for an edit."""
    return (logits.clone(),)


def _penalised(
    logits: Tensor, history: Tensor, lengths: Tensor, ahead: tuple[Tensor, ...], edits: Asked
) -> tuple[Tensor, ...]:
    presence, frequency, repetition = (edits[name][:, None, None] for name in PENALTIES)
    behind = torch.cat(ahead, dim=1)
    contained, counts = _seen(logits, history, lengths, behind, edits["prompt_length"])
    logits = logits + _bias(logits[:, 0], edits["bias_ids"], edits["bias_values"])[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(contained > 0, repeated, logits)
    return (logits - frequency * counts - presence * (counts > 0).to(logits.dtype),)


def _bias(like: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Returns what is added to the logits [B, V] of each slot; ids below 0 only fill the list."""
    values = torch.where(ids >= 0, values, 0.0)
    return torch.zeros_like(like).scatter_add(1, ids.clamp(min=0), values)


def _seen(
    logits: Tensor, history: Tensor, lengths: Tensor, ahead: Tensor, prompt_length: Tensor
) -> tuple[Tensor, Tensor]:
    """Count, for each row [B, R, V], what stands before it: in prompt and output, in the output."""
    R, V = logits.shape[1:]
    A = ahead.shape[1]
    place = torch.arange(history.shape[1], device=history.device)
    # Tokens behind `lengths` are left over from drafts or an earlier request.
    known = place < lengths[:, None]
    said = known & (place >= prompt_length[:, None])
    ids, zeros = history.clamp(0, V - 1), torch.zeros_like(logits[:, 0])
    every = zeros.scatter_add(1, ids, known.to(zeros.dtype))
    output = zeros.scatter_add(1, ids, said.to(zeros.dtype))
    vocabulary = torch.arange(V, device=history.device)
    rows = []
    for i in range(A):
        token = (vocabulary == ahead[:, i : i + 1]).to(zeros.dtype)
        # The newest token of a request's first step is its prompt's last.
        behind = (lengths + i >= prompt_length).to(zeros.dtype)[:, None]
        every, output = every + token, output + token * behind
        rows.append((every, output))
    contained, counts = zip(*rows[A - R :], strict=True)
    return torch.stack(contained, dim=1), torch.stack(counts, dim=1)


def recorded(history: Tensor, window: Tensor, lengths: Tensor) -> Tensor:
    """Write a window [B, T] behind the first `lengths` tokens of a history [B, S].

    Rejected drafts stand behind the new lengths, and are overwritten later.
    """
    row = torch.arange(window.shape[1], device=window.device)
    return history.scatter(1, lengths[:, None] + row, window)
