"""An oracle that a broken engine passes is none: each bug below must make O3 fail.

The bug's name says what was broken; the case says where the step oracle of `test_step.py` sees it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpbuild.builder.models.common import layers, moe
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import MTPModule, Rows
from mtpbuild.builder.models.deepseek_v3 import attention
from mtpbuild.builder.program import accept, draft
from mtpbuild.plugins import accept_rewind, mla_attention, take_rows
from tests.support.forced import COUNT, DRAFTS, LENGTH
from tests.support.steps import check_case

EAGLE = ("yarn-three-modules", 4, "mtp-eagle")
VANILLA = ("yarn-three-modules", 3, "mtp-vanilla")
Patch = Callable[[pytest.MonkeyPatch], None]


def lengths_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Tensor) -> tuple[Tensor, ...]:
        tokens, n, lengths, *rest = accept_rewind(*args)
        return (tokens, n, lengths - 1, *rest)

    patch.setattr(accept, "accept_rewind", wrong)


def padding_drafts_are_judged(patch: pytest.MonkeyPatch) -> None:
    def wrong(logits: Tensor, window: Tensor, drafts: Tensor, *rest: Tensor) -> Any:
        return accept_rewind(logits, window, torch.full_like(drafts, 99), *rest)

    patch.setattr(accept, "accept_rewind", wrong)


def last_draft_never_accepted(patch: pytest.MonkeyPatch) -> None:
    def wrong(logits: Tensor, window: Tensor, drafts: Tensor, *rest: Tensor) -> Any:
        return accept_rewind(logits, window, drafts.clamp(max=window.shape[1] - 2), *rest)

    patch.setattr(accept, "accept_rewind", wrong)


def hidden_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    norm, forward = CausalLM.logits, CausalLM.forward

    def wrong_forward(self: CausalLM, *args: Any) -> Any:
        final, self.norm = self.norm, torch.nn.Identity()  # type: ignore[assignment]
        try:
            return forward(self, *args)
        finally:
            self.norm = final

    def wrong_logits(self: CausalLM, hidden: Tensor) -> Tensor:
        return norm(self, self.norm(hidden) if hidden.shape[1] > 1 else hidden)

    patch.setattr(CausalLM, "forward", wrong_forward)
    patch.setattr(CausalLM, "logits", wrong_logits)


def swapped_concat_halves(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: MTPModule, embedding: Tensor, hidden: Tensor, rows: Rows) -> Tensor:
        return torch.cat([self.hnorm(hidden), self.enorm(embedding)], dim=-1) @ self.eh_proj

    patch.setattr(MTPModule, "join", wrong)


def mask_hides_own_row(patch: pytest.MonkeyPatch) -> None:
    def wrong(
        q: Tensor, cache: Tensor, fresh: Tensor, base: Tensor, first: Tensor, *rest: Any
    ) -> Any:
        return mla_attention(q, cache, fresh, base, (first - 1).clamp(min=0), *rest)

    patch.setattr(attention, "mla_attention", wrong)


def mask_shows_garbage(patch: pytest.MonkeyPatch) -> None:
    def wrong(
        q: Tensor, cache: Tensor, fresh: Tensor, base: Tensor, first: Tensor, *rest: Any
    ) -> Any:
        return mla_attention(q, cache, fresh, base + 1, first, *rest)

    patch.setattr(attention, "mla_attention", wrong)


def scale_over_the_latent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "softmax_scale", lambda rope, head_dim: 20**-0.5)  # the cache's C


def biased_router_weights(patch: pytest.MonkeyPatch) -> None:
    forward = moe.Gate.forward

    def wrong(self: moe.Gate, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = forward(self, x)
        return weights + self.e_score_correction_bias[ids], ids

    patch.setattr(moe.Gate, "forward", wrong)


def bias_not_used_to_select(patch: pytest.MonkeyPatch) -> None:
    init = moe.Gate.forward

    def wrong(self: moe.Gate, x: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.e_score_correction_bias
        self.e_score_correction_bias = torch.nn.Parameter(torch.zeros_like(bias), False)
        try:
            return init(self, x)
        finally:
            self.e_score_correction_bias = bias

    patch.setattr(moe.Gate, "forward", wrong)


def draft_reads_the_last_row(patch: pytest.MonkeyPatch) -> None:
    forward_last = MTPModule.forward_last

    def wrong(self: MTPModule, x: Tensor, cache: Tensor, rows: Any, at: Tensor) -> Any:
        return forward_last(self, x, cache, rows, torch.full_like(at, x.shape[1] - 1))

    patch.setattr(MTPModule, "forward_last", wrong)


def recycled_hidden_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    join = MTPModule.join

    def wrong(self: MTPModule, embedding: Tensor, hidden: Tensor, rows: Rows) -> Tensor:
        if hidden.shape[1] == 1:
            weight = self.shared_head["norm"].weight
            assert isinstance(weight, Tensor)
            hidden = hidden / weight
        return join(self, embedding, hidden, rows)

    patch.setattr(MTPModule, "join", wrong)


def draft_positions_stand_still(patch: pytest.MonkeyPatch) -> None:
    forward = layers.Rope.forward

    def wrong(self: layers.Rope, start: Tensor, tokens: int, base: Tensor | None = None) -> Any:
        return forward(self, start if base is None else base, tokens, base)

    patch.setattr(layers.Rope, "forward", wrong)


def vanilla_window_of_k_slots(patch: pytest.MonkeyPatch) -> None:
    """A slot is missed whenever all drafts are accepted: docs/architecture.md has the lemma."""
    init = draft.Vanilla.__init__

    def wrong(self: draft.Vanilla, nextn: int) -> None:
        init(self, nextn)
        self.slots = nextn

    patch.setattr(draft.Vanilla, "__init__", wrong)


def stale_past_hidden(patch: pytest.MonkeyPatch) -> None:
    take = take_rows

    def wrong(x: Tensor, start: Tensor, count: int) -> Tensor:
        stale = count == 3 and x.shape[-1] > 1  # what becomes past_hidden
        return take(x, (start - 1).clamp(min=0) if stale else start, count)

    patch.setattr(draft, "take_rows", wrong)


def modules_do_not_chain(patch: pytest.MonkeyPatch) -> None:
    """Give module 2 the main model's hiddens, as TensorRT-LLM's vanilla does."""
    norm, count = MTPModule.norm, [0]

    def wrong(self: MTPModule, x: Tensor) -> Tensor:
        count[0] += 1
        return norm(self, x).roll(1, dims=-1) if x.shape[1] > 1 else norm(self, x)

    patch.setattr(MTPModule, "norm", wrong)


# Each with the case that shows it, and the oracle's message.
BUGS: list[tuple[Patch, tuple[str, int, Any], str]] = [
    (lengths_off_by_one, EAGLE, LENGTH),
    (padding_drafts_are_judged, EAGLE, COUNT),
    (last_draft_never_accepted, EAGLE, COUNT),
    (hidden_before_the_norm, EAGLE, DRAFTS),
    (swapped_concat_halves, EAGLE, DRAFTS),
    (mask_hides_own_row, EAGLE, DRAFTS),
    (mask_shows_garbage, EAGLE, DRAFTS),
    (scale_over_the_latent, EAGLE, COUNT),
    (biased_router_weights, EAGLE, COUNT),
    (bias_not_used_to_select, EAGLE, DRAFTS),
    (draft_reads_the_last_row, EAGLE, DRAFTS),
    (recycled_hidden_before_the_norm, EAGLE, DRAFTS),
    (draft_positions_stand_still, EAGLE, DRAFTS),
    (swapped_concat_halves, VANILLA, DRAFTS),
    (vanilla_window_of_k_slots, VANILLA, DRAFTS),
    (stale_past_hidden, VANILLA, DRAFTS),
    (modules_do_not_chain, VANILLA, DRAFTS),
]


@pytest.mark.parametrize(
    ("bug", "case", "says"), BUGS, ids=[f"{b.__name__}-{c[2]}" for b, c, _ in BUGS]
)
def test_the_oracle_catches(
    bug: Patch, case: tuple[str, int, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=f"^{says}"):
        check_case(*case)
