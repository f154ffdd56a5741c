"""What a step asks of its acceptance, and the two kinds: greedy alone, and every mode mixed."""

from typing import Protocol

import torch
from torch import Tensor

from mtpbuild.plugins import accept_rewind
from mtpbuild.plugins.accept_rewind.branch import when
from mtpbuild.plugins.accept_rewind.distribution import Shaping, draw, shaped_probs
from mtpbuild.plugins.accept_rewind.mixed import Judging, Verdict, accept_mixed, draft_number

State = dict[str, Tensor]


class Acceptance(Protocol):
    def judge(self, logits: Tensor, state: State, active: Tensor) -> Verdict:
        """Which of the window's tokens are emitted; logits [B, T, V]."""
        ...

    def choose(self, logits: Tensor, k: int) -> Tensor:
        """Draft k (from 1) behind the newest token: logits [B, 1, V] -> [B, 1]."""
        ...

    def draft_probs(self, state: State) -> State:
        """What the drafts were drawn from, if the state has a place for it."""
        ...


class GreedyAcceptance:
    """All slots strict and greedy: nothing is paid for sampling.

    State that it only passes on is cloned: one tensor can't be a graph's input and output.
    """

    def judge(self, logits: Tensor, state: State, active: Tensor) -> Verdict:
        tokens, n, lengths, logprobs, margins = accept_rewind(
            logits, state["window"], state["num_drafts"], state["lengths"], active
        )
        return Verdict(tokens, n, lengths, logprobs, margins, state["thinking"].clone())

    def choose(self, logits: Tensor, k: int) -> Tensor:
        return logits.argmax(-1)

    def draft_probs(self, state: State) -> State:
        return {name: state[name].clone() for name in ("draft_probs",) if name in state}


class MixedAcceptance:
    """Each slot as its request asks. sampled_drafts [B]: draw drafts where the target is drawn."""

    def __init__(self, judging: Judging, sampled_drafts: Tensor) -> None:
        self.judging, self.drawn = judging, sampled_drafts
        self.lengths: Tensor | None = None
        self.probs: list[Tensor] = []

    def judge(self, logits: Tensor, state: State, active: Tensor) -> Verdict:
        B, T, V = logits.shape
        empty = logits.new_zeros(B, T - 1, V)
        verdict = accept_mixed(
            logits,
            state["window"],
            state["num_drafts"],
            state["lengths"],
            active,
            state["thinking"],
            state.get("draft_probs", empty),
            self.judging,
        )
        self.lengths = verdict.lengths
        return verdict

    def choose(self, logits: Tensor, k: int) -> Tensor:
        """By the inverse CDF at the number that strict acceptance will use for that position.

        So a draft that the target agrees with in distribution is mostly the target's token
        (DESIGN 5): accepted more often than an argmax, or than one drawn at a number of its own.
        """
        assert self.lengths is not None, "drafts are chosen after judging"
        number, shaping = draft_number(self.judging, self.lengths, k), self.judging.shaping
        operands = (logits, number, self.drawn, *vars(shaping).values())
        sampled = (shaping.temperature > 0).any()
        draft, law = when(sampled, _sampled_draft, _greedy_draft, operands)
        self.probs.append(law)
        return draft

    def draft_probs(self, state: State) -> State:
        if "draft_probs" not in state:
            return {}
        unused = state["draft_probs"][:, len(self.probs) :]  # of an adaptive engine
        laws = [*self.probs, unused] if unused.shape[1] else self.probs
        return {"draft_probs": torch.cat(laws, dim=1)} if laws else {}


def _sampled_draft(
    logits: Tensor, number: Tensor, drawn: Tensor, *shaping: Tensor
) -> tuple[Tensor, ...]:
    """A draft [B, 1] and the law that it was drawn from [B, 1, V]: a point if it is an argmax."""
    best, chosen = logits.argmax(-1), drawn & (shaping[0] > 0)
    q = shaped_probs(logits, Shaping(*shaping).rows(2))
    point = torch.zeros_like(q).scatter(-1, best[..., None], 1.0)
    draft = torch.where(chosen[:, None], draw(q, number)[0], best)
    return draft, torch.where(chosen[:, None, None], q, point)


def _greedy_draft(logits: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The law is not asked for."""
    return logits.argmax(-1), torch.zeros_like(logits)
