"""An oracle that a broken engine passes is none: each bug below must make O3 fail.

The bug's name says what was broken; the case says where the step oracle of `test_step.py` sees it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpbuild.builder.models.common import layers, moe
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import MTPModule
from mtpbuild.builder.models.deepseek_v3 import model as v3_model
from mtpbuild.builder.program import accept, draft
from tests.support.forced import COUNT, DRAFTS, LENGTH
from tests.support.planted import Patch, replaced, wrapped
from tests.support.steps import check_case

EAGLE = ("yarn-three-modules", 4, "mtp-eagle")
VANILLA = ("yarn-three-modules", 3, "mtp-vanilla")


def lengths_off_by_one(accept_rewind: Any, *given: Tensor) -> Any:
    tokens, n, lengths, *rest = accept_rewind(*given)
    return (tokens, n, lengths - 1, *rest)


def judged(drafts: Any) -> Patch:
    """Let acceptance be told another number of drafts, by the window and the right number."""
    return wrapped(
        accept,
        "accept_rewind",
        lambda real, logits, window, n, *rest: real(logits, window, drafts(window, n), *rest),
    )


def hidden_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    logits, forward = CausalLM.logits, CausalLM.forward

    def wrong_forward(self: CausalLM, *args: Any) -> Any:
        final, self.norm = self.norm, torch.nn.Identity()  # type: ignore[assignment]
        try:
            return forward(self, *args)
        finally:
            self.norm = final

    def wrong_logits(self: CausalLM, hidden: Tensor) -> Tensor:
        return logits(self, self.norm(hidden) if hidden.shape[1] > 1 else hidden)

    patch.setattr(CausalLM, "forward", wrong_forward)
    patch.setattr(CausalLM, "logits", wrong_logits)


def swapped_halves(join: Any, self: Any, embedding: Tensor, hidden: Tensor, rows: Any) -> Tensor:
    return torch.cat([self.hnorm(hidden), self.enorm(embedding)], dim=-1) @ self.eh_proj


def seen(moved: Any) -> Patch:
    """Let attention see other rows: moved(base, first) in their place."""
    return wrapped(
        v3_model,
        "mla_attention",
        lambda real, q, cache, fresh, base, first, *rest, **named: real(
            q, cache, fresh, *moved(base, first), *rest, **named
        ),
    )


def biased_router_weights(forward: Any, self: moe.Gate, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = forward(self, x)
    return weights + self.e_score_correction_bias[ids], ids


def bias_not_used_to_select(forward: Any, self: moe.Gate, x: Tensor) -> Any:
    bias = self.e_score_correction_bias
    self.e_score_correction_bias = torch.nn.Parameter(torch.zeros_like(bias), False)
    try:
        return forward(self, x)
    finally:
        self.e_score_correction_bias = bias


def last_row(forward_last: Any, self: Any, x: Tensor, cache: Tensor, rows: Any, at: Tensor) -> Any:
    return forward_last(self, x, cache, rows, torch.full_like(at, x.shape[1] - 1))


def recycled_before_the_norm(
    join: Any, self: Any, embedding: Tensor, hidden: Tensor, rows: Any
) -> Any:
    if hidden.shape[1] == 1:
        hidden = hidden / self.shared_head["norm"].weight
    return join(self, embedding, hidden, rows)


def positions_stand_still(
    forward: Any, self: Any, start: Tensor, tokens: int, *how: Any, offset: int = 0
) -> Any:
    rows = forward(self, start, tokens, *how)
    return replace(rows, first=rows.first + offset)


def window_of_k_slots(init: Any, self: draft.Vanilla, nextn: int) -> None:
    """Miss a slot whenever all drafts are accepted: docs/architecture.md has the lemma."""
    init(self, nextn)
    self.slots = nextn


def stale_past_hidden(take: Any, x: Tensor, start: Tensor, count: int) -> Any:
    stale = count == 3 and x.shape[-1] > 1  # what becomes past_hidden
    return take(x, (start - 1).clamp(min=0) if stale else start, count)


def shifted_hidden_states(norm: Any, self: MTPModule, x: Tensor) -> Any:
    """Hand the next module hidden states whose features are shifted by one."""
    return norm(self, x).roll(1, dims=-1) if x.shape[1] > 1 else norm(self, x)


SWAPPED = wrapped(MTPModule, "combine_inputs", swapped_halves)
# Each with the case that shows it, and the oracle's message.
BUGS: dict[str, tuple[Patch, tuple[str, int, Any], str]] = {
    "lengths off by one": (wrapped(accept, "accept_rewind", lengths_off_by_one), EAGLE, LENGTH),
    "padding is judged": (judged(lambda window, n: torch.full_like(n, 99)), EAGLE, COUNT),
    "the last draft is not": (
        judged(lambda window, n: n.clamp(max=window.shape[1] - 2)),
        EAGLE,
        COUNT,
    ),
    "hidden before the norm": (hidden_before_the_norm, EAGLE, DRAFTS),
    "swapped halves": (SWAPPED, EAGLE, DRAFTS),
    "the own row is hidden": (
        seen(lambda base, first: (base, (first - 1).clamp(min=0))),
        EAGLE,
        DRAFTS,
    ),
    "garbage is seen": (seen(lambda base, first: (base + 1, first)), EAGLE, DRAFTS),
    "scale over the latent": (
        replaced(v3_model, "softmax_scale", lambda rope, head_dim: 20**-0.5),  # the cache's C
        EAGLE,
        COUNT,
    ),
    "biased router weights": (wrapped(moe.Gate, "forward", biased_router_weights), EAGLE, COUNT),
    "no bias in choices": (wrapped(moe.Gate, "forward", bias_not_used_to_select), EAGLE, DRAFTS),
    "drafts from the last row": (wrapped(MTPModule, "forward_last", last_row), EAGLE, DRAFTS),
    "recycled before the norm": (
        wrapped(MTPModule, "combine_inputs", recycled_before_the_norm),
        EAGLE,
        DRAFTS,
    ),
    "positions stand still": (
        wrapped(layers.Rope, "forward", positions_stand_still),
        EAGLE,
        DRAFTS,
    ),
    "swapped halves, vanilla": (SWAPPED, VANILLA, DRAFTS),
    "a window of K slots": (wrapped(draft.Vanilla, "__init__", window_of_k_slots), VANILLA, DRAFTS),
    "stale past hidden": (wrapped(draft, "take_rows", stale_past_hidden), VANILLA, DRAFTS),
    "hidden states are shifted": (
        wrapped(MTPModule, "norm", shifted_hidden_states),
        VANILLA,
        DRAFTS,
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_the_oracle_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug, case, says = BUGS[name]
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=f"^{says}"):
        check_case(*case)
