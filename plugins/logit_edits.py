"""What requests forbid and penalise: edits of a window's logits before they are judged."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mtpbuild.plugins.branch import when
from mtpbuild.plugins.control_tensors import Controls
from mtpbuild.plugins.penalties import PENALTY_CONTROLS, apply_penalties, copy_logits
from mtpbuild.runtime.contract.controls import ALLOWED, CONSTRAINED, WORD


def edit_logits(
    logits: Tensor,
    at: Tensor,
    window: Tensor,
    controls: Controls,
    history: Tensor | None,
    grammar: Mapping[str, Tensor] | None,
) -> Tensor:
    """Apply the requests' bans, biases, penalties and grammars to logits [B, T, V]."""
    logits = _apply_controls(logits, at, window, controls, history)
    if grammar:
        logits = without_forbidden(logits, grammar[CONSTRAINED], grammar[ALLOWED])
    return logits


def _apply_controls(
    logits: Tensor, at: Tensor, window: Tensor, controls: Controls, history: Tensor | None
) -> Tensor:
    """Apply bans, biases and penalties; without a history there are only bans, and no branch."""
    if history is None:
        return without_banned(logits, at, controls)
    edits = {name: controls[name] for name in (*PENALTY_CONTROLS, "banned_ids", "banned_until")}
    wanted = (at[:, 0] < controls["banned_until"]) | controls["penalised"]
    operands = (logits, at, window, edits, history)
    return when(wanted.any(), _ban_and_penalise, copy_logits, operands)[0]


def _ban_and_penalise(
    logits: Tensor, at: Tensor, window: Tensor, edits: Controls, history: Tensor
) -> tuple[Tensor, ...]:
    left = without_banned(logits, at, edits)
    return (apply_penalties(left, history, at[:, 0] - 1, (window,), edits),)


def without_banned(logits: Tensor, at: Tensor, controls: Controls) -> Tensor:
    """Set the logits [B, T, V] of tokens that may not be emitted yet (min_tokens) to -inf."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    banned = (ids == controls["banned_ids"][..., None]).any(1)  # [B, V]
    early = at < controls["banned_until"][:, None]  # [B, T]
    return logits.masked_fill(early[..., None] & banned[:, None], -torch.inf)


def without_forbidden(logits: Tensor, constrained: Tensor, allowed: Tensor) -> Tensor:
    """Set the logits [B, T, V] of tokens that a slot's grammar forbids in their row to -inf.

    constrained [B] bool: slots with a grammar. allowed [B, T, ceil(V / 32)] int32: bit masks of
    allowed tokens, unpacked only if a slot of the step has a grammar.
    """
    operands = (logits, constrained, allowed)
    return when(constrained.any(), _mask_forbidden, copy_logits, operands)[0]


def _mask_forbidden(logits: Tensor, constrained: Tensor, allowed: Tensor) -> tuple[Tensor, ...]:
    place = torch.arange(WORD, dtype=torch.int32, device=logits.device)
    bits = torch.bitwise_left_shift(torch.ones_like(place), place)  # the last one is the sign bit
    free = (allowed[..., None] & bits) != 0
    free = free.flatten(-2)[..., : logits.shape[-1]] | ~constrained[:, None, None]
    return (torch.where(free, logits, -torch.inf),)
