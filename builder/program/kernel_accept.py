"""Every mode mixed, by ops that a target has kernels for: nothing sorts the vocabulary."""

import torch
from torch import Tensor

from mtpbuild.builder.program.accept import MixedAcceptance, State
from mtpbuild.plugins import accept_mixed_op, shaped_probs_op
from mtpbuild.plugins.accept_rewind.distribution import draw
from mtpbuild.plugins.accept_rewind.mixed import TOP, Verdict, draft_number


class KernelAcceptance(MixedAcceptance):
    """The same verdicts and drafts as its base, without branches: a kernel asks slot by slot."""

    def judge(self, logits: Tensor, state: State, active: Tensor) -> Verdict:
        shaping, *others = vars(self.judging).values()
        tokens, n, lengths, logprobs, thinking, margins = accept_mixed_op(
            logits,
            state["window"],
            state["num_drafts"],
            state["lengths"],
            active,
            state["thinking"],
            state.get("draft_probs", logits),
            *vars(shaping).values(),
            *others,
        )
        self.lengths = lengths
        top = logits.log_softmax(-1).topk(min(TOP, logits.shape[-1]), dim=-1)
        return Verdict(tokens, n, lengths, logprobs, margins, thinking, top.indices, top.values)

    def choose(self, logits: Tensor, k: int) -> Tensor:
        assert self.lengths is not None, "drafts are chosen after judging"
        number, shaping = draft_number(self.judging, self.lengths, k), self.judging.shaping
        chosen = (self.drawn & (shaping.temperature > 0))[:, None]
        best = logits.argmax(-1)
        q = shaped_probs_op(logits, *vars(shaping).values())
        point = torch.zeros_like(q).scatter(-1, best[..., None], 1.0)
        self.probs.append(torch.where(chosen[..., None], q, point))
        return torch.where(chosen, draw(q, number)[0], best)
