"""The algorithm on one screen: verify, accept, rewind and draft, as one graph.

Names as in DESIGN 3: B slots, K = nextn drafts, T = K + 1 window tokens, S cache rows. A slot's
known tokens are t_0 .. t_M; t_M is in no cache yet, so `lengths` = M.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from mtpbuild.builder.draft import Accepted, Drafter
from mtpbuild.builder.model.deepseek_v3 import DeepseekV3
from mtpbuild.plugins import accept_rewind

State = dict[str, Tensor]


class StepProgram(nn.Module):
    """One decode step of all active slots. State in, state out: in place is the target's duty."""

    def __init__(self, model: DeepseekV3, drafter: Drafter | None, nextn: int) -> None:
        super().__init__()
        self.model, self.drafter, self.nextn = model, drafter, nextn

    def forward(self, state: State, active: Tensor) -> tuple[State, State]:
        """state: the tensors of `state_specs`; active [B] bool. Returns new state, and outputs."""
        window, lengths = state["window"], state["lengths"]
        T = self.nextn + 1

        # 1. Verify: the main model over the newest token and its drafts. An inactive slot computes
        #    too; its rows go to the end of the cache, which no occupied slot has reached.
        caches = cache_list(state, "kv")
        base = torch.where(active, lengths, torch.full_like(lengths, caches[0].shape[2] - T))
        rows = self.model.rope(base, T)
        hidden, caches = self.model(window, caches, rows)
        logits = self.model.logits(hidden)

        # 2. Accept, 3. rewind: n tokens come out, n rows are committed, the rest is garbage.
        tokens, n, lengths, logprobs, margins = accept_rewind(
            logits, window, state["num_drafts"], lengths, active
        )

        # 4. Draft behind the newest token.
        newest = tokens.gather(1, (n - 1).clamp(min=0)[:, None])
        new = {f"kv.{i}": cache for i, cache in enumerate(caches)}
        drafts = newest[:, :0]
        if self.drafter is not None:
            accepted = Accepted(hidden, tokens.clamp(min=0), n, lengths, active, rows)
            drafts, updates = self.drafter(self.model, state, accepted)
            new |= updates
        new |= {
            "lengths": lengths,
            "window": torch.where(active[:, None], torch.cat([newest, drafts], 1), window),
            "num_drafts": torch.where(active, self.nextn, state["num_drafts"]),
        }
        outputs = {"tokens": tokens, "num_tokens": n, "logprobs": logprobs, "margins": margins}
        return {name: new[name] for name in state}, outputs


class PrefillProgram(nn.Module):
    """Fills one slot's caches with a chunk of the prompt; no head, no sampling, no drafting."""

    def __init__(self, model: DeepseekV3, drafter: Drafter | None) -> None:
        super().__init__()
        self.model, self.drafter = model, drafter
        self.lookahead = 0 if drafter is None else drafter.lookahead

    def forward(
        self, state: State, tokens: Tensor, start: Tensor, ahead: Tensor | None = None
    ) -> State:
        """tokens [1, T] at positions start [1] ..; ahead [1, lookahead]: the tokens behind them."""
        rows = replace(self.model.rope(start, tokens.shape[1]), expand=True)
        caches = cache_list(state, "kv")
        if self.drafter is None or ahead is None:
            new = self.model.fill(tokens, caches, rows)
            return {f"kv.{i}": cache for i, cache in enumerate(new)}
        hidden, caches = self.model(tokens, caches, rows)
        tokens = torch.cat([tokens, ahead], dim=1)
        updates = self.drafter.prefill(self.model, state, tokens, hidden, rows)
        new_state = {f"kv.{i}": cache for i, cache in enumerate(caches)} | updates
        return {name: new_state[name] for name in state}


def cache_list(state: State, kind: str) -> list[Tensor]:
    return [tensor for name, tensor in state.items() if name.startswith(kind + ".")]
