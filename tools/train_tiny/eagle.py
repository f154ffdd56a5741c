"""Applies module 1 several times, for all start slots at once, as MTP Eagle does to draft."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model import TrainedModel

Row = tuple[Tensor, Tensor]  # keys, values [B, H, T, D]


def shifted(x: Tensor, by: int, dim: int) -> Tensor:
    """Move x `by` slots later along `dim`, and put zeros in front."""
    if by == 0:
        return x
    rest = x.narrow(dim, 0, x.shape[dim] - by)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, by)), rest], dim)


def attend_recycled(q: Tensor, rows: list[Row], mask: Tensor) -> Tensor:
    """Compute the attention of pass j = len(rows).

    A query at slot p sees the first pass's rows up to slot p - j + 1, and one row of each later
    pass i (2 <= i <= j), the one at slot p - (j - i).
    """
    j, t = len(rows), q.shape[2]
    at = torch.arange(t, device=q.device)
    early = at[None, :] <= at[:, None] - (j - 1)  # [T, T]
    scores = [(q @ rows[0][0].mT).float() + torch.where(early, mask, -1e9)]
    recycled = [
        (shifted(k, j - i, 2), shifted(v, j - i, 2)) for i, (k, v) in enumerate(rows[1:], 2)
    ]
    scores += [(q * k).sum(-1, keepdim=True).float() for k, _ in recycled]
    weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)  # [B, H, T, T + j - 1]
    attended = weights[..., :t] @ rows[0][1]
    for i, (_, v) in enumerate(recycled):
        attended = attended + weights[..., t + i, None] * v
    return attended


def eagle(
    model: TrainedModel, hidden: Tensor, following: Tensor, mask: Tensor, passes: int
) -> list[Tensor]:
    """Return module 1's normalised outputs of passes 1..passes, each [B, T, hidden] by own slot.

    Pass j at slot p drafts t_{p+2} as the j-th draft of the step that started at slot p - j + 1;
    `following` holds t_{p+1}, `hidden` the trunk's normalised hidden state of slot p.
    """
    module = model.mtp[0]
    cos, sin = model.cos[: following.shape[1]], model.sin[: following.shape[1]]
    embedded = F.embedding(following, model.embed)
    attention = module.block.attention
    rows: list[Row] = []
    outputs: list[Tensor] = []
    for _ in range(passes):
        x = module.join(hidden, embedded)
        q, k, v, *gate = attention.project(module.block.input_norm(x), cos, sin)
        rows.append((k, v))
        x = x + attention.output(attend_recycled(q, rows, mask), *gate)
        outputs.append(module.norm(x + module.block.ffn(module.block.post_norm(x))))
        hidden = shifted(outputs[-1], 1, 1)
    return outputs
