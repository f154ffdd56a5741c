"""A drafter with trained weights, as a package of its own brings it: a table of bigrams.

`FILES` are its weights: `counts.logits` [V, V], the logits of the token after each token.
"""

from pathlib import Path
from typing import Any

from mtpbuild.runtime.contract.drafters import DrafterRecord

FILES: list[Path] = []


class Bigrams:
    def __init__(self, nextn: int) -> None:
        self.nextn = nextn

    def __call__(self, model: Any, state: Any, step: Any) -> tuple[Any, dict[str, Any]]:
        import torch

        table = model.drafter.get_parameter("counts.logits")
        newest = step.tokens.gather(1, (step.n - 1).clamp(min=0)[:, None])
        drafts: list[Any] = []
        for k in range(self.nextn):
            logits = table[drafts[-1] if drafts else newest].float()
            drafts.append(step.choose(logits, k + 1))
        return torch.cat(drafts, 1), {}


BIGRAMS = DrafterRecord("bigrams", "tests.support.bigrams:Bigrams", weights=lambda config: FILES)
