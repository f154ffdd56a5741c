"""Checks the kernels between a step's products against the reference, on any device.

Without a GPU they run in Triton's interpreter, on CPU tensors (tests/conftest.py).
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from mtpbuild.plugins import (
    gated_product,
    mla_queries,
    mla_rows,
    mla_rows_write,
    mla_values,
    moe_route,
    rotary_rows,
)
from tests.support.kernels import (
    DTYPES,
    SEEDS,
    Draw,
    check_close,
    on,
    uninitialised_memory_is_nan,
)


@dataclass(frozen=True)
class Latents:
    """The shapes of one layer's attention; the seed draws everything else."""

    slots: int
    tokens: int
    heads: int
    nope: int
    rope: int
    rank: int
    value: int
    query: int | None  # width of the queries' latent; None: they have none
    interleaved: bool
    dtype: torch.dtype
    seed: int


@st.composite
def latents(draw: Draw) -> Latents:
    return Latents(
        slots=draw(st.integers(1, 3)),
        tokens=draw(st.sampled_from([1, 4, 7])),
        heads=draw(st.sampled_from([1, 3])),
        nope=draw(st.sampled_from([5, 16, 70])),
        rope=draw(st.sampled_from([2, 20])),
        rank=draw(st.sampled_from([5, 16, 130])),
        value=draw(st.sampled_from([4, 70])),
        query=draw(st.sampled_from([None, 7, 24])),
        interleaved=draw(st.booleans()),
        dtype=draw(DTYPES),
        seed=draw(SEEDS),
    )


def check_latents(case: Latents, device: str) -> None:
    """Check norms, rotation, cache rows, queries and values of a layer."""
    from mtpbuild.plugins.mla_heads.triton import mla_queries_triton, mla_values_triton
    from mtpbuild.plugins.mla_rows.triton import (
        mla_rows_into,
        mla_rows_triton,
        mla_rows_write_triton,
    )

    g = torch.Generator().manual_seed(case.seed)
    B, T, H, rank = case.slots, case.tokens, case.heads, case.rank
    C, capacity = rank + case.rope, 11

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(case.dtype)

    angles = torch.rand(B, T, case.rope // 2, generator=g) * 100
    turns = angles.cos(), angles.sin()
    q_norm = None if case.query is None else random(case.query)
    a = random(B, T, (case.query or H * (case.nope + case.rope)) + C)
    rows = (a, q_norm, random(rank), *turns)
    how = 1e-6, case.interleaved
    start = torch.randint(0, capacity - T + 1, (B,), generator=g)
    cache = random(B, 1, capacity, C)
    with uninitialised_memory_is_nan():
        close(mla_rows_triton(*on(device, rows), *how), mla_rows(*rows, *how), case.dtype)
        wanted = mla_rows_write(*rows, cache, start, *how)
        before = cache.to(device)
        held = before.clone()
        got = mla_rows_write_triton(*on(device, (*rows, before, start)), *how)
        close(got, wanted, case.dtype)
        assert torch.equal(held, before), "a copy is written"
        q, fresh = mla_rows_into(*on(device, (*rows, before, start)), *how)
        assert all(map(torch.equal, (q, fresh, before), got)), "and here the cache itself"
        parts = in_parts(g, a)
        apart = mla_rows_triton(*on(device, (parts, *rows[1:])), *how)
        whole = on(device, (parts.sum(0).to(case.dtype), *rows[1:]))
        close(apart, tuple(on("cpu", mla_rows_triton(*whole, *how))), case.dtype)
    for b, at in enumerate(start.tolist()):
        kept = [row for row in range(capacity) if not at <= row < at + T]
        assert torch.equal(before[b, :, kept].cpu(), cache[b, :, kept]), "other rows stay"

    w_uk = random(H, case.nope, rank) / case.nope**0.5
    heads = random(B, T, H * (case.nope + case.rope)), w_uk, *turns
    o, w_uv = random(B, H, T, rank), random(H, rank, case.value) / rank**0.5
    with uninitialised_memory_is_nan():
        got = mla_queries_triton(*on(device, heads), case.interleaved)
        close((got,), (mla_queries(*heads, case.interleaved),), case.dtype)
        parts = in_parts(g, heads[0])
        apart = mla_queries_triton(*on(device, (parts, *heads[1:])), case.interleaved)
        whole = on(device, (parts.sum(0).to(case.dtype), *heads[1:]))
        close((apart,), (mla_queries_triton(*whole, case.interleaved).cpu(),), case.dtype)
        close((mla_values_triton(*on(device, (o, w_uv))),), (mla_values(o, w_uv),), case.dtype)


def in_parts(g: torch.Generator, x: Tensor) -> Tensor:
    """Draw fp32 parts [splits, ..], one or several, of a product of x's shape."""
    splits = 1 + x.numel() % 4
    return torch.randn(splits, *x.shape, generator=g) / splits


def check_places(seed: int, device: str) -> None:
    """Check tokens' places: idle slots, drafts after the newest token, scaled angles."""
    from mtpbuild.plugins.rotary_rows.triton import rotary_rows_triton

    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 100_000, (1 + seed % 4,), generator=g)
    active = None if seed % 3 == 0 else torch.rand(start.shape, generator=g) < 0.6
    frequencies = torch.rand(1 + seed % 5, generator=g)
    tokens, offset, scale = 1 + seed % 3, seed % 4, (1.0, 1.3)[seed % 2]
    how = tokens, offset, 99_000, scale
    wanted = rotary_rows(start, active, frequencies, *how)
    with uninitialised_memory_is_nan():
        got = rotary_rows_triton(*on(device, (start, active, frequencies)), *how)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)
    _, _, base, place, first = wanted
    idle = torch.zeros_like(start, dtype=torch.bool) if active is None else ~active
    assert torch.equal(base, torch.where(idle, 0, start))
    assert torch.equal(place, torch.where(idle, 99_000, start))
    assert (first == offset).all()


def check_shared_routes(seed: int, device: str) -> None:
    """Check that the shared experts follow the chosen ones and weigh 1."""
    from mtpbuild.plugins.moe.triton import moe_route_triton

    g = torch.Generator().manual_seed(seed)
    logits, bias = torch.randn(3, 12, generator=g), torch.randn(12, generator=g)
    how, always = (4, 2, 3, True, 2.5), 1 + seed % 2
    weights, ids = moe_route(logits, bias, *how, always)
    alone = moe_route(logits, bias, *how)
    assert torch.equal(weights[:, :3], alone[0])
    assert torch.equal(ids[:, :3], alone[1])
    assert (weights[:, 3:] == 1).all()
    assert (ids[:, 3:] == torch.arange(12, 12 + always)).all()
    got = moe_route_triton(*on(device, (logits, bias)), *how, always)
    torch.testing.assert_close(got[0].cpu(), weights)
    assert torch.equal(got[1].cpu(), ids)


def check_gated(seed: int, rows: int, hidden: int, inner: int, device: str) -> None:
    from mtpbuild.plugins.gated_product.triton import gated_product_triton

    g = torch.Generator().manual_seed(seed)
    for dtype, limit in ((torch.float32, 0.0), (torch.bfloat16, 0.5), (torch.float32, 0.5)):
        x = torch.randn(1, rows, hidden, generator=g).to(dtype)
        gate_up = (torch.randn(hidden, 2 * inner, generator=g) / hidden**0.5).to(dtype)
        with uninitialised_memory_is_nan():
            got = gated_product_triton(*on(device, (x, gate_up)), limit)
        close((got,), (gated_product(x, gate_up, limit),), dtype)


def close(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        check_close(one, other, tolerance, tolerance)
