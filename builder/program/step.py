"""The decode step as one graph: verify, accept, rewind and draft.

Dimensions: B slots, K = nextn drafts, T = K + 1 window tokens, S cache rows. A slot's known
tokens are t_0 .. t_M; t_M is in no cache yet, so `lengths` = M.
"""

from dataclasses import replace
from functools import partial
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import Positions, State
from mtpbuild.builder.program.accept import Acceptance, MixedAcceptance, RanksAcceptance
from mtpbuild.builder.program.draft import AcceptedTokens, Drafter
from mtpbuild.builder.program.window import Window
from mtpbuild.plugins.control_tensors import name_controls
from mtpbuild.runtime.contract.controls import CORE_CONTROLS, MAX_LOGPROBS, Control
from mtpbuild.runtime.contract.programs import HIDDEN
from mtpbuild.runtime.contract.rules import Rule


def signature(*controls: Control) -> Signature:
    """Return the parameters of a mixed step; torch.export names a graph's inputs after them."""
    names = ("state", "active", *(control.name for control in controls))
    return Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])


class StepProgram(nn.Module):
    """One decode step of all active slots: it judges nextn drafts and makes nextn new ones.

    It takes the state and returns a new one; targets decide whether to write it in place. The state
    may have places for more drafts (`window.py`).
    """

    def __init__(self, model: CausalLM, drafter: Drafter | None, nextn: int) -> None:
        super().__init__()
        self.model, self.drafter, self.nextn = model, drafter, nextn
        self.for_host: tuple[str, ...] = ()  # outputs besides those of the acceptance

    def forward(self, state: State, active: Tensor) -> tuple[State, State]:
        """Run a greedy step; state: the tensors of `make_state_specs`, active [B] bool.

        Returns the new state and the outputs, by their names.
        """
        split = self.model.ranks.parts > 1
        return self.step(state, active, RanksAcceptance() if split else Acceptance())

    def step(self, state: State, active: Tensor, acceptance: Acceptance) -> tuple[State, State]:
        # 1. Verify: the main model over the newest token and its drafts.
        window = Window.of(state, self.nextn)
        rows = window.rows(self.model, active)
        hidden, updates = self.model(window.tokens, state, rows)

        # 2. Accept, 3. rewind: n tokens are emitted, n rows are committed, later rows are garbage,
        # and recurrent states advance by these n tokens.
        verdict = acceptance.verify(self.model, hidden, window.state, active)
        tokens, n, lengths = verdict.tokens, verdict.n, verdict.lengths

        # 4. Draft the tokens after the newest one.
        newest = window.newest(tokens, n)
        new = updates.after(n)
        drafts = newest[:, :0]
        if self.drafter is not None:
            known = tokens.clamp(min=0)
            draft = partial(acceptance.draft, self.model)
            accepted = AcceptedTokens(
                hidden, known, n, lengths, active, rows, acceptance.choose, draft
            )
            drafts, updates = self.drafter(self.model, state, accepted)
            new |= updates | acceptance.draft_probs(state)
        new |= acceptance.history(state) | {
            "lengths": lengths,
            "window": torch.where(
                active[:, None], window.make_next_window(newest, drafts), state["window"]
            ),
            "num_drafts": torch.where(active, self.nextn, state["num_drafts"]),
            "thinking": verdict.thinking,
        }
        named = vars(verdict) | {"num_tokens": n, HIDDEN: hidden}
        outputs = {name: named[name] for name in (*acceptance.outputs, *self.for_host)}
        return {name: new[name] for name in state}, outputs


class MixedStepProgram(StepProgram):
    """The same step for slots that sample, or whose acceptance is not strict.

    The host picks one of the two programs for each step. controls: the inputs that requests may
    set. constraints: the inputs after them, if grammars may mask tokens. rules: acceptance rules of
    other packages, whose controls are among `controls`.
    """

    def __init__(
        self,
        model: CausalLM,
        drafter: Drafter | None,
        nextn: int,
        acceptance: type[MixedAcceptance] = MixedAcceptance,
        controls: tuple[Control, ...] = CORE_CONTROLS,
        constraints: tuple[Control, ...] = (),
        rules: tuple[Rule, ...] = (),
    ) -> None:
        super().__init__(model, drafter, nextn)
        self.acceptance, self.rules = acceptance, rules
        self.controls, self.constraints = controls, constraints

        def forward(*values: Any) -> tuple[State, State]:
            return self.run_mixed_step(*values)

        forward.__signature__ = signature(*controls, *constraints)  # type: ignore[attr-defined]
        self.forward = forward  # type: ignore[assignment]

    def run_mixed_step(self, state: State, active: Tensor, *values: Tensor) -> tuple[State, State]:
        """Run a step with a tensor for each of `controls`, then for each of `constraints`."""
        table = (*self.controls, *self.constraints)
        inputs = name_controls(values, table)
        for control in table:  # inputs may have places for more drafts
            if "window" in control.shape and inputs[control.name].shape[1] > self.nextn + 1:
                inputs[control.name] = inputs[control.name][:, : self.nextn + 1]
        grammar = {control.name: inputs.pop(control.name) for control in self.constraints}
        acceptance = self.acceptance(inputs, grammar, self.rules)
        return self.step(state, active, acceptance)


class PrefillProgram(nn.Module):
    """A prefill of one slot's caches with a chunk of the prompt; it neither samples nor drafts."""

    def __init__(self, model: CausalLM, drafter: Drafter | None, expand: bool = True) -> None:
        """Take the parts. expand: whether attention expands latents to keys and values."""
        super().__init__()
        self.model, self.drafter, self.expand = model, drafter, expand

    def forward(
        self,
        state: State,
        tokens: Tensor,
        start: Tensor,
        ahead: Tensor | None = None,
    ) -> State:
        """Return the new state after tokens [1, T] at positions from start [1] on.

        ahead [1, lookahead]: the tokens after the chunk, if the drafter reads them.
        """
        if self.drafter is not None and ahead is not None:
            return self.fill(state, tokens, start, ahead)[0]
        chunk = torch.full_like(start, tokens.shape[1])
        new = self.model.fill(tokens, state, self.rows(start, tokens)).after(chunk, all_stay=True)
        return {name: new[name] for name in state}

    def fill(
        self, state: State, tokens: Tensor, start: Tensor, ahead: Tensor | None
    ) -> tuple[State, Tensor]:
        """Return the new state, and the main model's hidden states [1, T, E]."""
        rows = self.rows(start, tokens)
        hidden, updates = self.model(tokens, state, rows)
        chunk = torch.full_like(start, tokens.shape[1])
        new = updates.after(chunk, all_stay=True)
        if self.drafter is not None and ahead is not None:
            known = torch.cat([tokens, ahead], dim=1)
            new |= self.drafter.prefill(self.model, state, known, hidden, rows)
        return {name: new[name] for name in state}, hidden

    def rows(self, start: Tensor, tokens: Tensor) -> Positions:
        return replace(self.model.rope(start, tokens.shape[1]), expand=self.expand)


class FillDrafterProgram(PrefillProgram):
    """A prefill of the drafter alone, with tokens whose steps made no drafts."""

    def forward(  # type: ignore[override]
        self, state: State, tokens: Tensor, start: Tensor, ahead: Tensor, hidden: Tensor
    ) -> State:
        """Return the drafter's new state; hidden [1, T, E]: the main model's states there."""
        assert self.drafter is not None
        known, rows = torch.cat([tokens, ahead], dim=1), self.rows(start, tokens)
        new = self.drafter.prefill(self.model, state, known, hidden, rows)
        return {name: new[name] for name in state}


class ScoreProgram(PrefillProgram):
    """A prefill that also reports how probable the token after each one is."""

    def forward(  # type: ignore[override]
        self,
        state: State,
        tokens: Tensor,
        start: Tensor,
        following: Tensor,
        ahead: Tensor | None = None,
    ) -> tuple[State, State]:
        """Return the new state, and the `Scores` of each token of `following` [1, T]."""
        new, hidden = self.fill(state, tokens, start, ahead)
        logprobs = self.model.logits(hidden).log_softmax(-1)
        chosen = logprobs.gather(-1, following[..., None])
        top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]), dim=-1)
        return new, {
            "logprobs": chosen[..., 0],
            "ranks": (logprobs > chosen).sum(-1) + 1,
            "top_ids": top.indices,
            "top_logprobs": top.values,
        }
