"""compressed_attention and choose_compressed on a GPU: kernels read the rows of each token alone.

They are those of `mla_attention` and `choose_rows`, for rows in two places: a window's, and
compressed ones. A prompt's chunk, whose length is a symbol, gets PyTorch's operators.
"""

from typing import Any

import torch
from torch import Tensor

from mtpbuild.plugins.compressed_attention.op import (
    choose_compressed,
    compressed_attention,
    norm_queries,
    place_queries,
)
from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.mla_attention.triton import mla_attention_launches
from mtpbuild.plugins.sparse_rows.op import NONE
from mtpbuild.plugins.sparse_rows.triton import choose_rows_launches
from mtpbuild.plugins.stream_rows.op import rotate_end


def listed_attention(
    q: Tensor, sinks: Tensor, near: Tensor, far: Tensor, places: Tensor, far_at: int
) -> Tensor:
    """Attend with q [B, H, T, D] to rows of two stores [B, 1, S, D] and [B, 1, N, far_at + D ..].

    places [B, T, k]: numbers of rows, those of the second store from S on, then `NONE`.
    """
    (B, *_, D), S = q.shape, near.shape[2]
    count = torch.full((B,), S, device=q.device)
    operands = q.contiguous(), near, far.contiguous(), count, count, D**-0.5, D, places
    output: Tensor = mla_attention_launches(*operands, sinks=sinks, fresh_at=far_at).run()
    return output


def listed_choice(
    q: Tensor, weights: Tensor, cache: Tensor, base: Tensor, first: Tensor, sizes: list[int]
) -> Tensor:
    """Choose by rotated queries [B, T, H D] among rows [B, 1, n, C]; sizes: count, ratio, key."""
    B, _, _, C = cache.shape
    count, ratio, key = sizes
    angles, none = weights.new_empty(B, 0), cache.new_empty(B, 1, 0, C)
    operands = q.contiguous(), weights.contiguous(), angles, angles, cache, none, base, first
    chosen: Tensor = choose_rows_launches(*operands, count, True, ratio=ratio, key=key).run()
    return chosen


attend: Any = torch.library.triton_op(
    "mtpbuild_triton::listed_attention", listed_attention, mutates_args=()
)
choose: Any = torch.library.triton_op(
    "mtpbuild_triton::listed_choice", listed_choice, mutates_args=()
)


def as_rows(cache: Tensor, ratio: int) -> Tensor:
    """View a cache [B, 1, N, C] as one row for `ratio` places: [B, 1, N / ratio, ratio C]."""
    return cache.unflatten(2, (-1, ratio)).flatten(3)


def list_places(known: dict[str, Any], position: Tensor) -> Tensor:
    """Return the places [B, T, k] of the rows that queries at [B, T] attend to, for the kernel.

    First those of the window, the newest first, then compressed ones, then `NONE`.
    """
    S, window, base = known["cache"].shape[2], known["window"], known["base"][:, None, None]
    compressed, chosen = known["compressed"], known["chosen"]
    count = 0 if compressed is None else compressed.shape[2] // known["ratio"]
    more = count if chosen is None else chosen.shape[2]
    near = (position + 1).clamp(max=window)[..., None]
    i = torch.arange(window + more, device=position.device)
    at = position[..., None] - i
    held = at.clamp(min=0) % S
    if not known["written"]:
        held = torch.where(at < base, held, S + at - base)
    if compressed is None:
        return torch.where(i < near, held, NONE)
    number = (i - near).clamp(min=0)
    if chosen is None:
        complete = ((position + 1) // known["ratio"])[..., None]
        later = torch.where(number < complete, S + number, NONE)
    else:
        later = chosen.gather(-1, number.clamp(max=more - 1))
        later = torch.where((number < more) & (later >= 0), S + later, NONE)
    return torch.where(i < near, held, later)


def compressed_attention_triton(*operands: Any) -> Tensor:
    """Compute compressed_attention."""
    known = bind(compressed_attention, operands)
    q, cos, sin = known["q"], known["cos"], known["sin"]
    if not isinstance(q.shape[1], int):
        output: Tensor = compressed_attention._init_fn(*operands)
        return output
    q = norm_queries(q, known["sinks"].shape[0], cos, sin, known["eps"])
    span = known["base"], known["first"], q.shape[2], known["fresh"], known["written"]
    places = list_places(known, place_queries(*span))
    far, at, ratio = known["fresh"], 0, known["ratio"]
    if (compressed := known["compressed"]) is not None:
        far, at = as_rows(compressed, ratio), (ratio - known["group"]) * compressed.shape[3]
    o = attend(q, known["sinks"], known["cache"], far, places, at).transpose(1, 2)
    return rotate_end(o, cos, -sin).flatten(2)


def choose_compressed_triton(*operands: Any) -> Tensor:
    """Compute choose_compressed."""
    known = bind(choose_compressed, operands)
    q, weights, cache, ratio = (known[name] for name in ("q", "weights", "cache", "ratio"))
    if not isinstance(q.shape[1], int):
        chosen: Tensor = choose_compressed._init_fn(*operands)
        return chosen
    q = rotate_end(q.unflatten(-1, (weights.shape[2], -1)), known["cos"], known["sin"]).flatten(2)
    key = (ratio - known["group"]) * cache.shape[3] + known["place"]
    place = as_rows(cache, ratio), known["base"], known["first"]
    output: Tensor = choose(q, weights.float(), *place, [known["count"], ratio, key])
    return output
