"""Checks and times kernels of quantised weights, cache writes and sampled acceptance."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mtpbuild.builder.models.common.blocks import ScaledWeight
from mtpbuild.plugins import kv_write, matmul_scaled, moe
from mtpbuild.plugins.accept_mixed.op import accept_mixed_op
from mtpbuild.plugins.accept_mixed.triton import accept_mixed_launches
from mtpbuild.plugins.control_tensors import list_controls
from mtpbuild.plugins.kv_write.triton import kv_launch
from mtpbuild.plugins.matmul_scaled.op import dequantise
from mtpbuild.plugins.matmul_scaled.triton import matmul_scaled_triton
from mtpbuild.plugins.moe.triton import moe_triton
from mtpbuild.runtime.contract.controls import CORE_CONTROLS, StepControls, list_control_shapes
from on_gpu.kernels import Experts
from on_gpu.machine import COLD, Machine, Row, difference, microseconds, repeats
from on_gpu.random_model import fill_scaled

FORMS = ("fp8", "nvfp4")
SAMPLED = StepControls(temperature=0.8, top_p=0.95, seed=5)


def scaled(form: str, shape: tuple[int, ...], device: str) -> ScaledWeight:
    """Make a random weight [.., in, out] in the format `form`."""
    second = (1, shape[-1]) if form == "nvfp4" else None
    weight = ScaledWeight(shape, 16 if form == "nvfp4" else min(128, shape[-2]), second)
    fill_scaled(weight, device)
    return weight


def on_cpu(parts: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if part is None else part.cpu() for part in parts]


def nbytes_of(parts: Sequence[Tensor | None]) -> int:
    return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True)
class Product:
    """The shape of a product: x [tokens, inputs] by a quantised weight [inputs, outputs]."""

    tokens: int
    inputs: int
    outputs: int
    dtype: torch.dtype = torch.bfloat16


def products(cases: Sequence[Product], machine: Machine) -> Iterator[Row]:
    """Time matmul_scaled; the bound is reading the weight once."""
    for c in cases:
        for form in FORMS:
            parts = scaled(form, (c.inputs, c.outputs), machine.device).parts
            x = torch.randn(1, c.tokens, c.inputs, device=machine.device, dtype=c.dtype)
            wanted = matmul_scaled(x.cpu(), *on_cpu(parts))
            error = difference(matmul_scaled_triton(x, *parts), wanted)
            row = Row(f"matmul_scaled {form}", f"N {c.tokens} of {c.inputs} x {c.outputs}", error)
            if machine.bandwidth:
                nbytes = nbytes_of(parts)
                sets = [
                    scaled(form, (c.inputs, c.outputs), "cuda").parts
                    for _ in range(repeats(nbytes))
                ]
                calls = [partial(matmul_scaled_triton, x, *each) for each in sets]
                row.microseconds = microseconds(calls)
                row.bound = 1e6 * nbytes / machine.bandwidth
            yield row


def scaled_experts(cases: Sequence[Experts], machine: Machine) -> Iterator[Row]:
    """Time moe with k random experts of equal weight; the bound is reading those experts once."""
    for c in cases:
        for form in FORMS:
            device = machine.device
            up = scaled(form, (c.experts, c.hidden, 2 * c.inner), device).parts
            down = scaled(form, (c.experts, c.inner, c.hidden), device).parts
            ids = torch.rand(c.tokens, c.experts, device=device).topk(c.chosen).indices.int()
            weights = torch.full((c.tokens, c.chosen), 1 / c.chosen, device=device)
            x = torch.randn(c.tokens, c.hidden, device=device, dtype=c.dtype)
            operands = (x, weights, ids, up[0], down[0], *up[1:], *down[1:])
            error = difference(moe_triton(*operands)[:1], first_token(x, weights, ids, up, down))
            shape = f"N {c.tokens} of {c.experts} x {c.hidden} x {c.inner}"
            row = Row(f"moe {form}", shape, error)
            if machine.bandwidth:
                each = (nbytes_of(up) + nbytes_of(down)) // c.experts
                nbytes = each * int(ids.unique().numel())
                others = [
                    torch.rand(c.tokens, c.experts, device=device).topk(c.chosen).indices.int()
                    for _ in range(max(1, min(8, COLD // nbytes)))
                ]
                calls = [
                    partial(moe_triton, x, weights, chosen, *operands[3:])
                    for chosen in (ids, *others)
                ]
                row.microseconds = microseconds(calls)
                row.bound = 1e6 * nbytes / machine.bandwidth
            yield row


def first_token(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    up: Sequence[Tensor | None],
    down: Sequence[Tensor | None],
) -> Tensor:
    """Compute the reference's result for one token, in fp32, from that token's experts alone."""
    first = ids[0].long()
    chosen: list[Any] = [
        on_cpu([None if part is None else part[first] for part in parts]) for parts in (up, down)
    ]
    own = [dequantise(*parts) for parts in chosen]
    numbers = torch.arange(len(first), dtype=torch.int32)[None]
    return moe(x[:1].cpu().float(), weights[:1].cpu(), numbers, *own)


def writes(cases: Sequence[tuple[int, int, int, int]], machine: Machine) -> Iterator[Row]:
    """Time cache writes for cases (batch, tokens, rows, width).

    The bound is moving the fresh rows once.
    """
    for B, T, S, C in cases:
        dtype = torch.bfloat16 if machine.bandwidth else torch.float32

        def operands(B: int = B, T: int = T, S: int = S, C: int = C, d: Any = dtype) -> Any:
            made = (torch.randn(B, 1, n, C, device=machine.device, dtype=d) for n in (S, T))
            return *made, torch.randint(0, S - T, (B,), device=machine.device)

        first = operands()
        wanted = kv_write(*(tensor.cpu() for tensor in first))
        error = difference(kv_launch(*first).run()[0], wanted)  # in place
        row = Row("kv_write", f"B {B} T {T} S {S}", error)
        if machine.bandwidth:
            sets = [operands() for _ in range(repeats(B * S * C * 2))]
            row.microseconds = microseconds([kv_launch(*each).run for each in sets])
            row.bound = 1e6 * 2 * B * T * C * 2 / machine.bandwidth
        yield row


def mixed(cases: Sequence[tuple[int, int, int]], machine: Machine) -> Iterator[Row]:
    """Time acceptance of sampled requests for cases (batch, tokens, vocabulary).

    The bound is reading the logits once. The error is that of log-probabilities; a token that
    differs counts as 1.
    """
    for B, T, V in cases:
        operands = sampled(B, T, V)
        wanted = accept_mixed_op(*operands)
        moved = tree_map(lambda x: x.to(machine.device), operands)
        got = accept_mixed_launches(*moved).run()
        apart = float((got[0].cpu() != wanted[0]).sum())
        row = Row("accept_mixed", f"B {B} T {T} V {V}", max(apart, difference(got[3], wanted[3])))
        if machine.bandwidth:
            nbytes = 4 * B * T * V
            sets = [tree_map(lambda x: x.to("cuda"), sampled(B, T, V)) for _ in range(2)]
            calls = [partial(lambda given: accept_mixed_launches(*given).run(), s) for s in sets]
            row.microseconds = microseconds(calls)
            row.bound = 1e6 * nbytes / machine.bandwidth
        yield row


def sampled(B: int, T: int, V: int) -> tuple[Any, ...]:
    """Make operands of `accept_mixed`; every slot has a temperature, top-p and T - 1 drafts."""
    logits = 2 * torch.randn(B, T, V)
    window = torch.cat([torch.zeros(B, 1, dtype=torch.int64), logits[:, :-1].argmax(-1)], dim=1)
    zero, no = torch.zeros(B, dtype=torch.int64), torch.zeros(B, dtype=torch.bool)
    shapes = list_control_shapes(T - 1, 2 * T)
    rows = SAMPLED.rows({c.name: (shapes[c.name], c.dtype) for c in CORE_CONTROLS})
    asked = {name: torch.from_numpy(row).expand(B, *row.shape).contiguous() for name, row in rows}
    drafts = logits[:, : T - 1].softmax(-1)
    return logits, window, zero + T - 1, zero, ~no, no, drafts, list_controls(asked)
