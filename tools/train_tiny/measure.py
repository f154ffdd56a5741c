"""Measures the model card's figures: losses, agreements, acceptance of drafts, repeated text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from data import Batch
from eagle import eagle
from model import TrainedModel

DRAFTERS = ("vanilla", "eagle")
PASSES = 3  # of the recycled module, on held-out text


@dataclass
class Agreement:
    """Sums over held-out text; entry 0 is for the trunk, entry k for module k or pass k."""

    slots: list[int]
    loss: list[float]
    right: list[int]  # top-1 equals the text
    with_trunk: list[int]  # top-1 equals the trunk's, for the same position

    @classmethod
    def zero(cls, size: int) -> "Agreement":
        return cls([0] * size, [0.0] * size, [0] * size, [0] * size)

    def row(self, k: int) -> tuple[float, float, float]:
        n = max(1, self.slots[k])
        return self.loss[k] / n, self.right[k] / n, self.with_trunk[k] / n


@torch.no_grad()
def held_out(model: TrainedModel, batches: Sequence[Batch], length: int) -> dict[str, Agreement]:
    """Measure trunk, modules ("vanilla") and recycled module 1 ("eagle") on batches of text."""
    depth = len(model.mtp)
    sums = {"vanilla": Agreement.zero(depth + 1), "eagle": Agreement.zero(PASSES + 1)}
    for batch in batches:
        mask = batch.mask(length)
        hidden = model.trunk(batch.tokens[:, :length], mask)
        best = model.logits(hidden).argmax(-1)
        g, following = hidden, batch.tokens[:, 1 : length + 1]
        chain = [(0, hidden)]
        for k in range(depth):
            g = model.draft(k, g, batch.tokens[:, k + 1 : length + k + 1], mask)
            chain.append((k + 1, g))
        passes = eagle(model, hidden, following, mask, PASSES)
        for k, g in chain:
            add(sums["vanilla"], k, model, g, best, batch, k)
        for k, g in enumerate([hidden, *passes]):
            add(sums["eagle"], k, model, g, best, batch, min(k, 1))
    return sums


def add(
    sums: Agreement,
    k: int,
    model: TrainedModel,
    hidden: Tensor,
    best: Tensor,
    batch: Batch,
    ahead: int,
) -> None:
    """Count slots p whose prediction is for position p + ahead + 1."""
    length = best.shape[1] - ahead
    logits = model.logits(hidden[:, :length])
    targets = batch.targets(ahead + 1, best.shape[1])[:, :length]
    # Pass k of the recycled module starts k - 1 slots earlier; the first slots have no such start.
    has_start = torch.arange(length) >= max(0, k - 1)
    targets = torch.where(has_start, targets, -100)
    valid = targets >= 0
    top = logits.argmax(-1)
    sums.slots[k] += int(valid.sum())
    sums.loss[k] += float(F.cross_entropy(logits.mT, targets, ignore_index=-100, reduction="sum"))
    sums.right[k] += int((top == targets)[valid].sum())
    sums.with_trunk[k] += int((top == best[:, ahead:])[valid].sum())


@torch.no_grad()
def drafts(model: TrainedModel, tokens: Tensor, drafter: str, count: int) -> Tensor:
    """Return guesses [count + 1, T]: draft j of start slot p guesses tokens[p + j + 1].

    Row 0 is the trunk's own guess. Each draft assumes that the earlier ones are right. After a
    wrong one an engine would draft something else, but `acceptance` does not count those.
    """
    t = len(tokens)
    filled = torch.cat([tokens, tokens.new_zeros(count + 1)])[None]
    mask = torch.where(torch.ones(t, t).tril() > 0, 0.0, -1e9)[None, None]
    hidden = model.trunk(tokens[None], mask)
    found = [model.logits(hidden)[0].argmax(-1)]
    if drafter == "vanilla":
        for k in range(count):
            hidden = model.draft(k, hidden, filled[:, k + 1 : t + k + 1], mask)
            found.append(model.logits(hidden)[0].argmax(-1))
        return torch.stack(found)
    for j, output in enumerate(eagle(model, hidden, filled[:, 1 : t + 1], mask, count)):
        best = model.logits(output)[0].argmax(-1)
        found.append(torch.cat([best[j:], best.new_full((j,), -1)]))  # by start slot
    return torch.stack(found)


def acceptance(guesses: Tensor, tokens: Tensor, prompt: int, nextn: int) -> list[int]:
    """Return the tokens of each step, as if tokens[prompt:] were generated with `nextn` drafts."""
    steps, p = [], prompt  # tokens[p] is the newest token; slot p - 1 drafts for it
    while p + nextn < len(tokens):
        n = 1
        while n <= nextn and guesses[n, p - 1] == tokens[p + n]:
            n += 1
        steps.append(n)
        p += n
    return steps


def repeated_share(tokens: Sequence[int], size: int = 8) -> float:
    """Return the share of the output's n-grams, of `size` tokens, that occurred in it before."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
