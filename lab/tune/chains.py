"""Drafts at every place of known texts at once, as the steps of an engine would make them.

In docstrings a step at place q knows the tokens up to t_{q+1} and the trunk's hidden states up to
place q; its draft j is for t_{q+j+1}.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.plain import PlainAttention, PlainLM


class RecycledRows:
    """The attention of a module that runs on its own results.

    Row p of pass j belongs to the step at place p - j + 1. It sees the first pass's rows up to that
    place, and the step's own row of each later pass, i places after it in pass i + 1.
    """

    def __init__(self) -> None:
        self.keys, self.values = list[Tensor](), list[Tensor]()  # of each pass [B, H, T, D]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seen: None, *, is_causal: bool, scale: float
    ) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        j = len(self.keys)
        at = torch.arange(q.shape[2])
        before = at[:, None] - at  # how many places a row lies before the query's
        mask = torch.cat([before >= j - 1, *(before == j - i for i in range(2, j + 1))], dim=1)
        keys, values = torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale)


@contextmanager
def recycle_rows(module: nn.Module) -> Iterator[None]:
    """Let a module's passes in the block attend to those before them."""
    attentions = [part for part in module.modules() if isinstance(part, PlainAttention)]
    for part in attentions:
        part.attend = RecycledRows()
    try:
        yield
    finally:
        for part in attentions:
            del part.attend


def run_chain(
    plain: PlainLM, tokens: Tensor, hidden: Tensor, nextn: int, eagle: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield the module and the hidden states [B, T - j, E] of each draft j; row q is of place q.

    tokens [B, T]; hidden [B, T, E]: the trunk's. eagle: whether module 1 makes all drafts.
    """
    T = tokens.shape[1]
    if not eagle:
        for k in range(1, nextn + 1):
            hidden = plain.mtp(k, tokens[:, k:], hidden[:, : T - k])
            yield k, hidden
        return
    with recycle_rows(plain.module(1)):
        hidden = hidden[:, :-1]
        for earlier in range(nextn):
            hidden = plain.mtp(1, tokens[:, 1:], hidden)
            yield 1, hidden[:, earlier:]
            hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))  # to the next pass's places
