"""How a step judges and chooses tokens: greedily in all slots, or as each request asks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.collectives import gather_best
from mtpbuild.builder.models.common.layers import State
from mtpbuild.builder.program.window import Window
from mtpbuild.plugins import accept_best, accept_mixed_op, accept_rewind, draw, shaped_probs
from mtpbuild.plugins.accept_mixed.op import (
    Verdict,
    accept_mixed,
    draft_number,
    gather_rule_inputs,
    score_drafts,
)
from mtpbuild.plugins.accept_rewind.op import best_token
from mtpbuild.plugins.branch import when
from mtpbuild.plugins.control_tensors import Controls, list_controls
from mtpbuild.plugins.logit_edits import without_banned
from mtpbuild.plugins.penalties import PENALTY_CONTROLS, apply_penalties, record_window
from mtpbuild.plugins.shaped_probs.op import SHAPING, list_shaping
from mtpbuild.runtime.contract.controls import CORE_CONTROLS, HISTORY, MAX_LOGPROBS
from mtpbuild.runtime.contract.rules import Rule

# The outputs of a step: fields of `Verdict`, and its n.
OUTPUTS = ("tokens", "num_tokens", "logprobs", "margins")
OF_DRAFTS = ("draft_logprobs", "draft_ranks", "draft_q")
MIXED_OUTPUTS = (*OUTPUTS, "top_ids", "top_logprobs", *OF_DRAFTS)


class Acceptance:
    """Strict, greedy acceptance and drafting in all slots, without the cost of sampling.

    State that is only passed on is cloned, as a graph's input can't be its output too.
    """

    outputs: tuple[str, ...] = OUTPUTS

    def verify(self, model: CausalLM, hidden: Tensor, state: State, active: Tensor) -> Verdict:
        """Judge a window by the main model's hidden states [B, T, E]."""
        return self.judge(model.logits(hidden), state, active)

    def draft(self, model: CausalLM, j: int, hidden: Tensor, k: int) -> Tensor:
        """Choose draft k (from 1) by module j's hidden state [B, 1, E] -> int64 [B, 1]."""
        return self.choose(model.draft_logits(j, hidden), k)

    def judge(self, logits: Tensor, state: State, active: Tensor) -> Verdict:
        """Decide which of the window's tokens are emitted; logits [B, T, V], active [B] bool."""
        *slots, thinking = list_slot_operands(state, active)
        tokens, n, lengths, logprobs, margins = accept_rewind(logits, *slots)
        return Verdict(tokens, n, lengths, logprobs, margins, thinking.clone())

    def choose(self, logits: Tensor, k: int) -> Tensor:
        """Choose draft k, from 1 after the newest token: logits [B, 1, V] -> int64 [B, 1]."""
        return logits.argmax(-1)

    def draft_probs(self, state: State) -> State:
        """Return the distributions [B, K, V] of the drafts, if the state has a place for them."""
        return {name: state[name].clone() for name in ("draft_probs",) if name in state}

    def history(self, state: State) -> State:
        """Return the tokens that later penalties count, if the state has a place for them."""
        return {name: state[name].clone() for name in (HISTORY,) if name in state}


class RanksAcceptance(Acceptance):
    """Strict, greedy acceptance where ranks split a vocabulary: they exchange their best logits.

    Whole logits would be a third of the bytes that a step of DeepSeek-R1 sums over its ranks.
    """

    def verify(self, model: CausalLM, hidden: Tensor, state: State, active: Tensor) -> Verdict:
        *slots, thinking = list_slot_operands(state, active)
        best = model.logits(hidden, gather_best)
        tokens, n, lengths, logprobs, margins = accept_best(best, *slots)
        return Verdict(tokens, n, lengths, logprobs, margins, thinking.clone())

    def draft(self, model: CausalLM, j: int, hidden: Tensor, k: int) -> Tensor:
        return best_token(model.draft_logits(j, hidden, gather_best))


class MixedAcceptance(Acceptance):
    """Acceptance and drafting in each slot as its request asks.

    Where `sampled_drafts` is set and temperature is above 0, drafts are sampled from the drafter's
    distribution. Drafting ignores grammars; the host corrects drafts before the next step.
    Penalties apply if the state has a history.
    """

    outputs = MIXED_OUTPUTS

    def __init__(
        self,
        controls: Controls,
        grammar: Mapping[str, Tensor] | None = None,
        rules: Sequence[Rule] = (),
    ) -> None:
        """Take a step's inputs.

        controls: the requests' settings [B, ..]. grammar: the inputs of `CONSTRAINTS`, if any.
        rules: acceptance rules of other packages, whose settings are among `controls`.
        """
        self.controls = controls
        self.grammar = grammar or {}
        self.rules = rules
        self.lengths: Tensor | None = None
        self.probs: list[Tensor] = []
        self._history: Tensor | None = None  # all tokens so far, with the window's
        self._ahead: list[Tensor] = []  # the newest token, then the drafts chosen so far

    def judge(self, logits: Tensor, state: State, active: Tensor) -> Verdict:
        B, T, V = logits.shape
        verdict = accept_mixed(
            logits,
            *list_slot_operands(state, active),
            draft_probs=state.get("draft_probs", logits.new_zeros(B, T - 1, V)),
            controls=self.controls,
            history=state.get(HISTORY),
            grammar=self.grammar,
            rules=self.rules,
        )
        self.lengths = verdict.lengths
        if HISTORY in state:
            self._history = record_window(state[HISTORY], state["window"], state["lengths"])
            self._ahead = [Window.newest(verdict.tokens, verdict.n)]
        return verdict

    def choose(self, logits: Tensor, k: int) -> Tensor:
        """Sample by the inverse CDF, with the number that will draw the target's token there.

        Where the distributions of draft and target agree, both draws mostly give the same token. So
        the draft is accepted more often than an argmax, or than a draft drawn by a number of its
        own.

        Penalties change the drafts' logits as they will change the target's. The text is correct
        with any drafts, but a drafter without penalties goes on proposing tokens that they forbid.
        """
        assert self.lengths is not None, "drafts are chosen after judging"
        number = draft_number(self.controls, self.lengths, k)
        shaping = {name: self.controls[name] for name in SHAPING}
        not_greedy = self.controls["temperature"] > 0
        sampled = (logits, number, self.controls["sampled_drafts"], shaping)
        if self._history is None:
            draft, probs = when(not_greedy.any(), _draw_draft, _choose_greedy_draft, sampled)
        else:
            not_greedy = not_greedy | self.controls["penalised"]
            edits = {name: self.controls[name] for name in PENALTY_CONTROLS}
            penalties = (self._history, self.lengths, tuple(self._ahead), edits)
            draft, probs = when(
                not_greedy.any(), _draw_penalised_draft, _choose_greedy_draft, sampled + penalties
            )
        self.probs.append(probs)
        self._ahead.append(draft)
        return draft

    def draft_probs(self, state: State) -> State:
        if "draft_probs" not in state:
            return {}
        unused = state["draft_probs"][:, len(self.probs) :]  # in an adaptive engine
        probs = [*self.probs, unused] if unused.shape[1] else self.probs
        return {"draft_probs": torch.cat(probs, dim=1)} if probs else {}

    def history(self, state: State) -> State:
        return {} if self._history is None else {HISTORY: self._history}


class KernelAcceptance(MixedAcceptance):
    """The acceptance and drafting of `MixedAcceptance` without branches, by ops with kernels.

    A kernel reads each slot's controls and decides for it; nothing sorts the vocabulary.
    """

    def judge(self, logits: Tensor, state: State, active: Tensor) -> Verdict:
        probs = state.get("draft_probs", logits)
        controls = self.core()
        if self.rules and "draft_probs" in state:
            controls["synthetic"] = self.ruled(logits, state, probs)
        tokens, n, self.lengths, logprobs, thinking, margins = accept_mixed_op(
            logits, *list_slot_operands(state, active), probs, list_controls(controls)
        )
        every = logits.log_softmax(-1)
        top = every.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
        verdict = Verdict(tokens, n, self.lengths, logprobs, margins, thinking)
        drafts = score_drafts(every, state["window"], probs)
        return replace(verdict, top_ids=top.indices, top_logprobs=top.values, **drafts)

    def choose(self, logits: Tensor, k: int) -> Tensor:
        assert self.lengths is not None, "drafts are chosen after judging"
        number = draft_number(self.controls, self.lengths, k)
        draft, probs = _draw_draft(logits, number, self.controls["sampled_drafts"], self.controls)
        self.probs.append(probs)
        return draft

    def core(self) -> dict[str, Tensor]:
        """Return the controls that the ops take, without those of other packages' rules."""
        return {control.name: self.controls[control.name] for control in CORE_CONTROLS}

    def ruled(self, logits: Tensor, state: State, draft_probs: Tensor) -> Tensor:
        """Return rates [B, T] for the op's synthetic acceptance: 1 or 0, as a slot's rule decides.

        The op accepts a draft by chance, at this rate. A slot without a rule keeps its own rates.
        """
        window = state["window"]
        rates = self.controls["synthetic"]
        at = state["lengths"][:, None] + 1 + torch.arange(window.shape[1], device=window.device)
        p = shaped_probs(without_banned(logits, at, self.controls), *list_shaping(self.controls))
        judged = gather_rule_inputs(p, window, draft_probs, at, state["thinking"], self.controls)
        for rule in self.rules:
            assert rule.kernel is not None, "the target was asked to build a rule without a kernel"
            accepts = rule.kernel(judged) & (judged.p_draft > 0)
            rates = torch.where(self.controls[rule.name][:, None], accepts.to(rates.dtype), rates)
        return rates


def list_slot_operands(
    state: State, active: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the per-slot operands of acceptance, in the order of the ops."""
    return state["window"], state["num_drafts"], state["lengths"], active, state["thinking"]


def _draw_draft(
    logits: Tensor, number: Tensor, sampled_drafts: Tensor, shaping: Controls
) -> tuple[Tensor, ...]:
    """Return a draft [B, 1] and the distribution [B, 1, V] that it was drawn from.

    It is drawn at number [B, 1] in slots that sample their drafts; others take the argmax, whose
    distribution is a point mass.
    """
    best = logits.argmax(-1)
    samples = sampled_drafts & (shaping["temperature"] > 0)
    q = shaped_probs(logits, *list_shaping(shaping))
    point = torch.zeros_like(q).scatter(-1, best[..., None], 1.0)
    draft = torch.where(samples[:, None], draw(q, number)[0], best)
    return draft, torch.where(samples[:, None, None], q, point)


def _draw_penalised_draft(
    logits: Tensor,
    number: Tensor,
    sampled_drafts: Tensor,
    shaping: Controls,
    history: Tensor,
    lengths: Tensor,
    ahead: tuple[Tensor, ...],
    edits: Controls,
) -> tuple[Tensor, ...]:
    logits = apply_penalties(logits, history, lengths, ahead, edits)
    return _draw_draft(logits, number, sampled_drafts, shaping)


def _choose_greedy_draft(logits: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return the argmax [B, 1], and zeros for its distribution, which is never read."""
    return logits.argmax(-1), torch.zeros_like(logits)
