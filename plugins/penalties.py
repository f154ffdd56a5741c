"""Penalties and logit bias of requests, in vLLM's order.

vLLM (v1/sample/sampler.py) first adds `logit_bias`. Then, for each token in prompt or output, the
repetition penalty divides positive logits and multiplies negative ones. Then `frequency_penalty` is
subtracted for each occurrence of a token in the output, and `presence_penalty` once. Temperature
and filters come after that.

A row is edited as if the tokens before it had been emitted, including drafts. So drafts are judged
by the logits that a step without drafts would have computed.
"""

import torch
from torch import Tensor

from mtpbuild.plugins.branch import when
from mtpbuild.plugins.control_tensors import Controls

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
# The controls that penalties read.
PENALTY_CONTROLS = (*PENALTIES, "prompt_length", "bias_ids", "bias_values", "penalised")


def apply_penalties(
    logits: Tensor, history: Tensor, lengths: Tensor, ahead: tuple[Tensor, ...], controls: Controls
) -> Tensor:
    """Apply the requests' penalties and bias to logits [B, R, V]; copy them if there are none.

    history [B, S]: each slot's tokens, of which the first `lengths` [B] are valid. ahead: the
    tokens after them (the newest, then drafts), in tensors that join to [B, A], A >= R. The last
    row has seen all of them, each row before it one less.
    """
    edits = {name: controls[name] for name in PENALTY_CONTROLS}
    operands = (logits, history, lengths, ahead, edits)
    return when(controls["penalised"].any(), _penalise, copy_logits, operands)[0]


def copy_logits(logits: Tensor, *others: object) -> tuple[Tensor, ...]:
    """Return a copy of the logits: the branch in which no request asks for an edit."""
    return (logits.clone(),)


def _penalise(
    logits: Tensor, history: Tensor, lengths: Tensor, ahead: tuple[Tensor, ...], edits: Controls
) -> tuple[Tensor, ...]:
    presence, frequency, repetition = (edits[name][:, None, None] for name in PENALTIES)
    tokens = torch.cat(ahead, dim=1)
    contained, counts = _seen(logits, history, lengths, tokens, edits["prompt_length"])
    logits = logits + _sum_biases(logits[:, 0], edits["bias_ids"], edits["bias_values"])[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(contained > 0, repeated, logits)
    return (logits - frequency * counts - presence * (counts > 0).to(logits.dtype),)


def _sum_biases(like: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Return the bias [B, V] of each slot's logits; ids below 0 are padding."""
    values = torch.where(ids >= 0, values, 0.0)
    return torch.zeros_like(like).scatter_add(1, ids.clamp(min=0), values)


def _seen(
    logits: Tensor, history: Tensor, lengths: Tensor, ahead: Tensor, prompt_length: Tensor
) -> tuple[Tensor, Tensor]:
    """Count each token before each row, in prompt and output, and in the output: two [B, R, V]."""
    R, V = logits.shape[1:]
    A = ahead.shape[1]
    place = torch.arange(history.shape[1], device=history.device)
    # Tokens after `lengths` are left over from drafts or an earlier request.
    valid = place < lengths[:, None]
    emitted = valid & (place >= prompt_length[:, None])
    ids = history.clamp(0, V - 1)
    zeros = torch.zeros_like(logits[:, 0])
    every = zeros.scatter_add(1, ids, valid.to(zeros.dtype))
    output = zeros.scatter_add(1, ids, emitted.to(zeros.dtype))
    vocabulary = torch.arange(V, device=history.device)
    rows = []
    for i in range(A):
        token = (vocabulary == ahead[:, i : i + 1]).to(zeros.dtype)
        # In a request's first step the newest token is the prompt's last.
        is_output = (lengths + i >= prompt_length).to(zeros.dtype)[:, None]
        every, output = every + token, output + token * is_output
        rows.append((every, output))
    contained, counts = zip(*rows[A - R :], strict=True)
    return torch.stack(contained, dim=1), torch.stack(counts, dim=1)


def record_window(history: Tensor, window: Tensor, lengths: Tensor) -> Tensor:
    """Write a window [B, T] after the first `lengths` tokens of a history [B, S].

    Rejected drafts lie after the new lengths and are overwritten later.
    """
    row = torch.arange(window.shape[1], device=window.device)
    return history.scatter(1, lengths[:, None] + row, window)
