"""What an indexer chooses, token by token and row by row, and operands for it."""

from typing import Any

import torch
from torch import Tensor

from mtpbuild.builder.models.common.rope import rotate

GARBAGE = 1e20  # in rows that nobody may choose


def operands(
    seed: int,
    slots: int,
    tokens: int,
    rows: int,
    fresh: int,
    levels: int | None = None,
    sizes: tuple[int, int, int] = (4, 16, 2),
    garbage: float = GARBAGE,
) -> dict[str, Tensor]:
    """Draw operands of `choose_rows`, whose rows are wider than a key by 3.

    sizes: heads, values of each, and pairs of them that rotate.

    levels: keys and queries have so many different numbers, and nothing rotates: many scores tie,
    in whatever order they are summed where heads and values are powers of 4.
    """
    torch.manual_seed(seed)
    heads, size, half = sizes
    width = size + 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape) if levels is None else torch.randint(levels, shape).float()

    base = torch.randint(0, rows + 1, (slots,))
    first = torch.randint(0, fresh - tokens + 1, (slots,))
    cache, new = draw(slots, 1, rows, width), draw(slots, 1, fresh, width)
    for b in range(slots):
        cache[b, :, int(base[b]) :] = garbage
        new[b, :, int(first[b]) + tokens :] = garbage
    angles = torch.rand(slots, tokens, half) * (levels is None)
    return {
        "q": draw(slots, tokens, heads * size), "weights": draw(slots, tokens, heads),
        "cos": angles.cos(), "sin": angles.sin(), "cache": cache, "fresh": new, "base": base,
        "first": first,
    }  # fmt: skip


def choose_plainly(given: dict[str, Any], count: int, interleaved: bool) -> Tensor:
    """Score only the rows that a token may see; of equal scores the lowest position wins."""
    q, weights = given["q"], given["weights"]
    B, T, heads = weights.shape
    found = torch.full((B, T, count), -1)
    size, half = q.shape[-1] // heads, given["cos"].shape[-1]
    for b in range(B):
        for t in range(T):
            new = given["fresh"][b, 0, : int(given["first"][b]) + t + 1]
            keys = torch.cat([given["cache"][b, 0, : int(given["base"][b])], new])[:, -size:]
            scores = torch.zeros(len(keys))
            for h in range(heads):
                own = q[b, t, h * size : (h + 1) * size]
                turned = own.clone()
                a = rotate(own[: 2 * half], given["cos"][b, t], given["sin"][b, t], interleaved)
                turned[: 2 * half] = (
                    torch.stack([a[:half], a[half:]], -1).flatten() if interleaved else a
                )
                product = (keys @ turned / size**0.5).clamp(min=0)
                scores = scores + weights[b, t, h] / heads**0.5 * product
            order = sorted(range(len(keys)), key=lambda i: (-float(scores[i]), i))
            best = sorted(order[:count])
            found[b, t, : len(best)] = torch.tensor(best)
    return found
