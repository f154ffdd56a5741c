"""Every mode mixed, by ops that a target has kernels for: nothing sorts the vocabulary."""

import torch
from torch import Tensor

from mtpbuild.builder.program.accept import MixedAcceptance, State, slots_of
from mtpbuild.plugins import accept_mixed_op, shaped_probs_op
from mtpbuild.plugins.accept_mixed.op import Verdict, draft_number
from mtpbuild.plugins.asked import in_order
from mtpbuild.plugins.shaped_probs.op import draw
from mtpbuild.runtime.controls import MAX_LOGPROBS


class KernelAcceptance(MixedAcceptance):
    """The same verdicts and drafts as its base, without branches: a kernel asks slot by slot."""

    def judge(self, logits: Tensor, state: State, active: Tensor) -> Verdict:
        probs = state.get("draft_probs", logits)
        operands = (logits, *slots_of(state, active), probs, in_order(self.asked))
        tokens, n, self.lengths, logprobs, thinking, margins = accept_mixed_op(*operands)
        top = logits.log_softmax(-1).topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
        decided = (tokens, n, self.lengths, logprobs, margins, thinking)
        return Verdict(*decided, top.indices, top.values)

    def choose(self, logits: Tensor, k: int) -> Tensor:
        assert self.lengths is not None, "drafts are chosen after judging"
        number = draft_number(self.asked, self.lengths, k)
        chosen = (self.asked["sampled_drafts"] & (self.asked["temperature"] > 0))[:, None]
        best = logits.argmax(-1)
        q = shaped_probs_op(logits, in_order(self.asked))
        point = torch.zeros_like(q).scatter(-1, best[..., None], 1.0)
        self.probs.append(torch.where(chosen[..., None], q, point))
        return torch.where(chosen, draw(q, number)[0], best)
