"""compressed_rows: make one row of many tokens', from the projections of these and earlier ones."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.grouped_rows.op import write_ring
from mtpbuild.plugins.stream_rows.op import rotate_end


@define(
    lambda compressed, opened: (torch.empty_like(compressed), torch.empty_like(opened)),
    Node("CompressedRows", renamed={"eps": "epsilon"}, typed="compressed"),
)
def compressed_rows_write(
    a: Tensor,
    compressed: Tensor,
    opened: Tensor,
    start: Tensor,
    bias: Tensor,
    norm: Tensor,
    key_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Write the projections of T tokens, and the compressed rows that they complete.

    a [B, T, C]: values, then gates, of W windows of each kind of rows. They go from row start [B]
    on into the ring opened [B, 1, S, C]; a slot whose start is negative writes nothing. Each r
    tokens of a slot make a row, together with the r before them if W is 2: gates plus bias
    [r, C / 2] weigh the values of all these tokens by a softmax of each channel. W is 2 with a norm
    of keys. Each kind is normed, norm [D] and key_norm [I], and its last R numbers are rotated:
    cos, sin [B, n, R / 2] are the angles of the rows from number start // r on. Row j of D + I
    numbers lies in the places of its last `group` tokens in compressed [B, 1, S, width]. Returns
    both caches. As with `kv_write`, a target binds them to the caches' own memory.
    """
    (B, T, _), r = a.shape, bias.shape[0]
    opened = write_ring(opened, a[:, None].to(opened.dtype), start)
    first = start.clamp(min=0)[:, None]
    ahead = torch.arange(cos.shape[1], device=a.device)
    numbers = first // r + ahead
    over = (numbers - (compressed.shape[2] // r - 1)).clamp(min=0)
    numbers = numbers - over  # the last row that the cache can hold stands for those after it
    at = (ahead - over).clamp(min=0)[..., None].expand(-1, -1, cos.shape[2])
    kinds = [norm] if key_norm is None else [norm, key_norm]
    made = compress_rows(opened, numbers, bias, kinds, (cos.gather(1, at), sin.gather(1, at)), eps)
    width = compressed.shape[3]
    made = F.pad(made, (0, group * width - made.shape[2])).unflatten(2, (group, width))
    places = numbers[..., None] * r + torch.arange(r - group, r, device=a.device)
    slots = torch.arange(B, device=a.device)[:, None, None]
    stays = (start[:, None] < 0) | ((numbers + 1) * r > first + T)
    made = torch.where(
        stays[..., None, None], compressed[:, 0][slots, places], made.to(compressed.dtype)
    )
    return compressed.index_put((slots, torch.zeros_like(places), places), made), opened


def compress_rows(
    opened: Tensor,
    numbers: Tensor,
    bias: Tensor,
    norms: list[Tensor],
    angles: tuple[Tensor, Tensor],
    eps: float,
) -> Tensor:
    """Return the rows [B, n, D + ..] with these numbers, of the projections in the ring."""
    r, W = bias.shape[0], len(norms)
    token = torch.arange(W * r, device=numbers.device) - (W - 1) * r
    places = (numbers[..., None] * r + token).clamp(min=0) % opened.shape[2]
    slots = torch.arange(opened.shape[0], device=numbers.device)[:, None, None]
    value, gate = opened[:, 0][slots, places].float().unflatten(2, (W, r)).chunk(2, dim=-1)
    gate = gate + bias
    if W > 1:  # before the first token there is no window
        there = (numbers > 0)[..., None] | (torch.arange(W, device=numbers.device) > 0)
        gate = torch.where(there[..., None, None], gate, float("-inf"))
    parts, at = list[Tensor](), 0
    for norm in norms:
        D = norm.shape[0]
        values, gates = (
            torch.cat([both[:, :, w, :, at + w * D :][..., :D] for w in range(W)], dim=2)
            for both in (value, gate)
        )
        at += W * D
        row = (values * gates.softmax(2)).sum(2)
        parts.append(rotate_end(F.rms_norm(row, norm.shape, norm.float(), eps), *angles))
    return torch.cat(parts, dim=-1)
