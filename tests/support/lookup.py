"""Prompt lookup, as a package of its own would bring it: what followed the newest token last time.

All of it is this file. torch is imported by builds alone, so that the record needs none.
"""

from typing import Any

from mtpbuild.runtime.contract.drafters import DrafterRecord
from mtpbuild.runtime.contract.state import StateSpec

SEEN = 24  # tokens that it looks the newest one up in
FAR = -1e30  # the logit of a token that is not proposed


def states(plan: Any) -> tuple[StateSpec, ...]:
    sizes = {"batch": plan.max_batch, "seen": SEEN}
    return (StateSpec(name="seen", role="carry", dtype="int64", sizes=sizes),)


class Lookup:
    def __init__(self, nextn: int) -> None:
        self.nextn = nextn

    def __call__(self, model: Any, state: Any, step: Any) -> tuple[Any, dict[str, Any]]:
        import torch

        known = torch.cat([state["seen"], step.tokens], 1)
        place = step.n[:, None] + torch.arange(SEEN)
        seen = known.gather(1, place)  # it ends with the newest token
        again = (seen[:, :-1] == seen[:, -1:]).flip(1).long()
        at = (
            again.argmax(1, keepdim=True) + 1 - SEEN
        ).neg()  # behind the newest place with this token
        drafts = []
        for k in range(self.nextn):
            token = seen.gather(1, (at + k).clamp(max=SEEN - 1))
            logits = torch.full((token.shape[0], 1, model.config.vocab_size), FAR)
            drafts.append(step.choose(logits.scatter(2, token[..., None], 0.0), k + 1))
        return torch.cat(drafts, 1), {"seen": seen}

    def prefill(self, model: Any, state: Any, tokens: Any, hidden: Any, rows: Any) -> Any:
        import torch

        return {"seen": torch.cat([state["seen"], tokens[:, 1:]], 1)[:, -SEEN:]}


LOOKUP = DrafterRecord(
    "lookup", "tests.support.lookup:Lookup", lookahead=lambda nextn: 1, states=states
)
