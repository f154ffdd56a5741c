"""Compares our Triton kernels with their references, their bounds and other projects' kernels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins import accept_rewind, mla_attention, moe, moe_route
from mtpbuild.plugins.accept_rewind.triton import accept_rewind_triton
from mtpbuild.plugins.launch import AOT_SHARED, shared_memory
from mtpbuild.plugins.mla_attention.triton import mla_attention_launches
from mtpbuild.plugins.moe.triton import moe_route_triton, moe_triton
from on_gpu.machine import COLD, Call, Machine, Row, difference, microseconds, repeats

RANK, ROPE, SCALE = 512, 64, 0.1352337789


@dataclass(frozen=True)
class Attention:
    batch: int
    tokens: int
    context: int
    heads: int
    rank: int = RANK
    rope: int = ROPE
    dtype: torch.dtype = torch.bfloat16

    def operands(self, device: str) -> tuple[Tensor, ...]:
        """Make q, cache, fresh, base and first; every slot has `context` committed rows."""
        B, T, C = self.batch, self.tokens, self.rank + self.rope
        shapes = (B, self.heads, T, C), (B, 1, self.context, C), (B, 1, T, C)
        floats = (torch.randn(shape, device=device, dtype=self.dtype) for shape in shapes)
        base = torch.full((B,), self.context, device=device)
        return *floats, base, torch.zeros_like(base)

    def kernel(self, operands: tuple[Tensor, ...], shared: int) -> Tensor:
        return mla_attention_launches(*operands, SCALE, self.rank, shared=shared).run()

    def bound(self, machine: Machine) -> float:
        """Return the least microseconds, for reading the cache once or for both products."""
        width, rows = self.rank + self.rope, self.batch * (self.context + self.tokens)
        queries = self.batch * self.heads * self.tokens
        nbytes = (rows * width + queries * (width + self.rank)) * self.dtype.itemsize
        operations = 2 * self.heads * self.tokens * rows * (width + self.rank)
        return 1e6 * max(nbytes / machine.bandwidth, operations / machine.rate)


def attention(cases: Sequence[Attention], machine: Machine) -> Iterator[Row]:
    for case in cases:
        row = Row(
            "mla_attention", f"B {case.batch} T {case.tokens} S {case.context} H {case.heads}", 0
        )
        probe = replace(case, batch=1, context=min(case.context, 1024)).operands(machine.device)
        shared = shared_memory(probe[0].device)
        exact = (x.cpu().float() if x.is_floating_point() else x.cpu() for x in probe)
        wanted = mla_attention(*exact, SCALE, case.rank)
        row.error = difference(case.kernel(probe, shared), wanted)
        if machine.bandwidth:
            nbytes = probe[1][0, 0, 0].nbytes * case.context * case.batch
            sets = [case.operands("cuda") for _ in range(repeats(nbytes))]
            row.microseconds = microseconds([partial(case.kernel, s, shared) for s in sets])
            row.bound = case.bound(machine)
            aot = microseconds([partial(case.kernel, s, AOT_SHARED) for s in sets])
            row.beside = [f"AOT {aot:.1f}", sdpa_time(case, sets)]
        yield row


def sdpa_time(case: Attention, sets: Sequence[tuple[Tensor, ...]]) -> str:
    """Time SDPA on the same rows; a failure is shown, not hidden."""
    try:
        return f"SDPA {microseconds([sdpa(case, *operands) for operands in sets]):.1f}"
    except Exception as error:  # any error of PyTorch's: memory, a shape
        return f"SDPA failed ({type(error).__name__})"


def sdpa(case: Attention, q: Tensor, cache: Tensor, *rest: Tensor) -> Call:
    """Return a call of SDPA; it has no mask, which would only slow it: tokens see all rows."""
    k, v = cache.expand(-1, case.heads, -1, -1), cache[..., : case.rank]
    v = v.expand(-1, case.heads, -1, -1)
    return lambda: F.scaled_dot_product_attention(q, k, v, scale=SCALE)


def acceptance(cases: Sequence[tuple[int, int, int]], machine: Machine) -> Iterator[Row]:
    """Time strict greedy acceptance for cases (batch, tokens, vocabulary).

    The bound is reading the logits once.
    """
    for B, T, V in cases:
        zero = torch.zeros(B, dtype=torch.int64)
        operands = torch.randn(B, T, V), torch.zeros(B, T, dtype=torch.int64), zero + T - 1
        wanted = accept_rewind(*operands, zero, zero == 0)

        def moved(zero: Tensor = zero, operands: Any = operands) -> tuple[Tensor, ...]:
            return tuple(x.to(machine.device) for x in (*operands, zero, zero == 0))

        got = accept_rewind_triton(*moved())
        error = max(difference(a, b) for a, b in zip(got, wanted, strict=True))
        row = Row("accept_rewind", f"B {B} T {T} V {V}", error)
        if machine.bandwidth:
            nbytes = 4 * B * T * V
            sets = [moved() for _ in range(repeats(nbytes))]
            row.microseconds = microseconds([partial(accept_rewind_triton, *s) for s in sets])
            row.bound = 1e6 * nbytes / machine.bandwidth
        yield row


@dataclass(frozen=True)
class Experts:
    """The shape of a rank's experts; a token may choose any of them."""

    tokens: int
    experts: int
    chosen: int
    hidden: int
    inner: int
    dtype: torch.dtype = torch.bfloat16


def experts(cases: Sequence[Experts], machine: Machine) -> Iterator[Row]:
    """Time moe; the bound is reading the chosen experts' weights once."""
    for c in cases:
        device = machine.device
        scores = torch.randn(c.tokens, c.experts, device=device)
        bias = torch.zeros(c.experts, device=device)
        weights, ids = moe_route_triton(scores, bias, 1, 1, c.chosen, True, 2.5)
        plain = moe_route(scores.cpu(), bias.cpu(), 1, 1, c.chosen, True, 2.5)
        assert torch.equal(ids.cpu(), plain[1]), "moe_route chose other experts"
        x = torch.randn(c.tokens, c.hidden, device=device, dtype=c.dtype)
        up = torch.randn(c.experts, c.hidden, 2 * c.inner, device=device, dtype=c.dtype)
        down = torch.randn(c.experts, c.inner, c.hidden, device=device, dtype=c.dtype)
        up, down = up / c.hidden**0.5, down / c.inner**0.5
        first = ids[0].long()
        own = (m[first].cpu().float() for m in (up, down))
        numbers = torch.arange(c.chosen, dtype=torch.int32)[None]
        wanted = moe(x[:1].cpu().float(), weights[:1].cpu(), numbers, *own)
        error = difference(moe_triton(x, weights, ids, up, down)[:1], wanted)
        row = Row("moe", f"N {c.tokens} of {c.experts} x {c.hidden} x {c.inner}", error)
        if machine.bandwidth:
            each = (up[0].numel() + down[0].numel()) * c.dtype.itemsize
            nbytes = each * int(ids.unique().numel())
            sets = [
                (up, down),
                *((up.clone(), down.clone()) for _ in range(min(2, COLD // nbytes))),
            ]
            row.microseconds = microseconds(
                [partial(moe_triton, x, weights, ids, *s) for s in sets]
            )
            row.bound = 1e6 * nbytes / machine.bandwidth
        yield row
