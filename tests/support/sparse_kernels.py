"""Checks the Triton kernels that choose rows, and attend to chosen ones, against the references.

Without a GPU the kernels run in Triton's interpreter, on CPU tensors (tests/conftest.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtpbuild.plugins import choose_rows, mla_attention
from mtpbuild.plugins.compressed_attention.op import choose_compressed, compressed_attention
from mtpbuild.plugins.grouped_rows.op import write_ring
from mtpbuild.plugins.sparse_rows.op import NONE
from tests.support.choosers import operands
from tests.support.kernels import check_close, on

NAN = float("nan")


@dataclass(frozen=True)
class Choice:
    """The sizes of a call of `choose_rows`, and how its operands are drawn (`operands`)."""

    slots: int
    tokens: int
    rows: int
    fresh: int
    count: int
    levels: int | None = None
    interleaved: bool = False
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, int, int] = (4, 16, 2)
    scored: int | None = None  # rows that a program scores; None: as many as the kernel wants
    block: int | None = None  # positions that a program looks at together
    seed: int = 0


def check_choice(case: Choice, device: str) -> Tensor:
    """Check every position; rows that nobody sees are NaN. Return the kernels' choice."""
    from mtpbuild.plugins.sparse_rows.triton import choose_rows_launches

    shape = case.slots, case.tokens, case.rows, case.fresh
    given = operands(case.seed, *shape, case.levels, case.sizes, NAN)
    for name in ("q", "cache", "fresh"):
        given[name] = given[name].to(case.dtype)
    how = case.count, case.interleaved
    finite = (x.nan_to_num() if x.is_floating_point() else x for x in given.values())
    wanted = choose_rows(*finite, *how)
    moved = on(device, given.values())
    got: Tensor = choose_rows_launches(*moved, *how, rows=case.scored, block=case.block).run()
    assert got.dtype == torch.int64
    assert torch.equal(got.cpu(), wanted)
    return wanted


def check_nan(device: str) -> None:
    """Check that a score that is no number is chosen last, never in a finite one's place."""
    from mtpbuild.plugins.sparse_rows.triton import choose_rows_launches

    given = operands(0, 1, 1, 20, 1, levels=1)  # all zeros: everything ties
    given["base"][:], given["cache"] = 20, torch.zeros(1, 1, 20, 19)
    given["cache"][:, :, [1, 4]] = NAN
    moved = on(device, given.values())
    for count, wanted in ((4, [0, 2, 3, 5]), (20, [*range(4), *range(5, 21)])):
        assert choose_rows_launches(*moved, count, False).run().tolist() == [[wanted]]


@dataclass(frozen=True)
class Chosen:
    """The sizes of a call of `mla_attention` to `count` chosen rows, which are wider."""

    slots: int
    heads: int
    tokens: int
    fresh: int
    rank: int
    rope: int
    capacity: int
    count: int
    dtype: torch.dtype
    splits: int | None
    shared: int
    seed: int = 0


def check_chosen(case: Chosen, device: str) -> None:
    """Check attention to positions anywhere; rows that are not chosen are NaN."""
    from mtpbuild.plugins.mla_attention.triton import mla_attention_launches

    g = torch.Generator().manual_seed(case.seed)
    B, T, C = case.slots, case.tokens, case.rank + case.rope

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(case.dtype)

    q = draw(B, case.heads, T, C)
    cache, fresh = draw(B, 1, case.capacity, C + 8), draw(B, 1, case.fresh, C + 8)
    base = torch.randint(case.capacity // 2, case.capacity + 1, (B,), generator=g)
    first = torch.randint(0, case.fresh - T + 1, (B,), generator=g)
    chosen = torch.full((B, T, case.count), NONE)
    unread = torch.ones(B, case.capacity + case.fresh, dtype=torch.bool)
    for b in range(B):
        for t in range(T):
            some = torch.randperm(int(base[b] + first[b]) + t + 1, generator=g)[: case.count]
            chosen[b, t, : len(some)] = some.sort().values
            unread[b, torch.where(some < base[b], some, some - base[b] + case.capacity)] = False
    how: Any = base, first, 0.2, case.rank, chosen
    wanted = mla_attention(q.float(), cache.float(), fresh.float(), *how)
    cache[unread[:, None, : case.capacity]] = NAN
    fresh[unread[:, None, case.capacity :]] = NAN
    given = on(device, (q, cache, fresh, *how))
    launches = mla_attention_launches(*given, splits=case.splits, shared=case.shared, least=20)
    got = launches.run()
    assert got.dtype == case.dtype
    check_close(got, wanted, 1e-5, 3e-2)


def check_idle(device: str) -> None:
    """Check a slot that idles, with another pass's positions: its result is finite."""
    from mtpbuild.plugins.mla_attention.triton import mla_attention_launches

    q, cache, fresh = torch.randn(2, 3, 1, 24), torch.randn(2, 1, 30, 32), torch.randn(2, 1, 2, 32)
    chosen = torch.full((2, 1, 12), NONE)
    chosen[:, 0, :9] = torch.arange(20, 29)
    base, first = torch.tensor([0, 30]), torch.zeros(2, dtype=torch.int64)
    given = on(device, (q, cache, fresh, base, first))
    for splits in (1, 3):
        how: Any = 0.2, 16, chosen.to(device)
        got = mla_attention_launches(*given, *how, splits=splits, least=1).run().cpu()
        wanted = mla_attention(q, cache, fresh, base, first, 0.2, 16, chosen)
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=1e-5)
        assert got.isfinite().all()


@dataclass(frozen=True)
class Compressed:
    """The sizes of a call of `compressed_attention`; count: rows that are chosen, or 0: all."""

    ratio: int
    group: int
    count: int
    written: bool = True
    tokens: int = 2
    heads: int = 3
    dtype: torch.dtype = torch.float32
    seed: int = 0


def check_compressed(case: Compressed, device: str) -> None:
    """Check choice and attention of three slots; rows that no token sees are NaN."""
    from mtpbuild.plugins.compressed_attention.triton import (
        choose_compressed_triton,
        compressed_attention_triton,
    )

    g = torch.Generator().manual_seed(case.seed)
    B, T, H, D, R, I, W, S = 3, case.tokens, case.heads, 16, 4, 6, 5, 12  # noqa: E741
    r, group, F, N = case.ratio, case.group, case.tokens + 2 * (not case.written), 9 * case.ratio

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(case.dtype)

    q, queries, weights = draw(B, T, H * D), draw(B, T, 3 * I), draw(B, T, 3).float()
    cos, sin, sinks = draw(B, T, R // 2).float(), draw(B, T, R // 2).float(), draw(H).float()
    cache, fresh = draw(B, 1, S, D), draw(B, 1, F, D)
    compressed = draw(B, 1, N, -(-(D + I) // group)) if case.written else None
    base = torch.tensor([0, 3, int(torch.randint(W, N - F, (1,), generator=g))])
    first = torch.full_like(base, F - T)
    if case.written:
        cache = write_ring(cache, fresh, base)
    choice: tuple[Any, Any] = choose_compressed, choose_compressed_triton
    attention: tuple[Any, Any] = compressed_attention, compressed_attention_triton
    results = list[tuple[Any, Tensor]]()
    for i, (choose, attend) in enumerate(zip(choice, attention, strict=True)):
        if i:  # the reference has run
            spoil_unseen(cache, compressed, (base, first + base + T), (W, r, group), case.written)
        there = on(device, (cos, sin, base, first, q, sinks, cache, fresh, queries, weights))
        cos, sin, base, first, q, sinks, cache, fresh, queries, weights = there
        rows, chosen = compressed if compressed is None else compressed.to(device), None
        if case.count and rows is not None:
            place = cos, sin, rows, base, first
            chosen = choose(queries, weights, *place, case.count, r, group, D)
        how = W, r, group, case.written, 1e-6
        y = attend(q, sinks, cos, sin, cache, base, first, fresh, rows, chosen, *how)
        results.append((chosen, y))
    (wanted, y), (chosen, got) = results
    assert wanted is None or torch.equal(chosen.cpu(), wanted)
    assert got.dtype == case.dtype
    check_close(got, y, 1e-5, 5e-2)


def spoil_unseen(
    cache: Tensor,
    compressed: Tensor | None,
    span: tuple[Tensor, Tensor],
    sizes: tuple[int, int, int],
    written: bool,
) -> None:
    """Fill rows with NaN that no query of a pass sees; span: its base, and the end of its tokens.

    sizes: of the window, and of compressed rows.
    """
    (window, ratio, group), tokens = sizes, int((span[1] - span[0]).max())
    for b, (base, end) in enumerate(zip(span[0].tolist(), span[1].tolist(), strict=True)):
        seen = range(max(0, end - tokens - window + 1), end if written else base)
        unseen = {*range(cache.shape[2])} - {p % cache.shape[2] for p in seen}
        cache[b, 0, list(unseen)] = NAN
        if compressed is not None:
            compressed[b, 0, end // ratio * ratio :] = NAN
            compressed[b, 0].unflatten(0, (-1, ratio))[:, : ratio - group] = NAN
