"""Checks each Triton kernel on any device against its op's reference, on random cases.

Without a GPU the kernels run in Triton's interpreter, on CPU tensors (tests/conftest.py).
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

from mtpbuild.plugins import (
    accept_rewind,
    best_of_blocks,
    kv_write,
    matmul_scaled,
    matmul_wide,
    mla_attention,
    moe,
    moe_route,
    shaped_probs,
)
from mtpbuild.plugins.accept_mixed.op import accept_mixed_op
from mtpbuild.plugins.control_tensors import Controls, list_controls
from mtpbuild.plugins.launch import AOT_SHARED
from mtpbuild.plugins.moe.op import NO_EXPERT
from mtpbuild.plugins.shaped_probs.op import list_shaping
from mtpbuild.runtime.contract.controls import (
    CONTROLS,
    CORE_CONTROLS,
    GREEDY,
    Control,
    StepControls,
    list_control_shapes,
)

Draw = Callable[..., Any]
SEEDS = st.integers(0, 1 << 20)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def on(device: str, operands: Iterable[Any]) -> list[Any]:
    return [x.to(device) if isinstance(x, Tensor) else x for x in operands]


def check_close(got: Tensor, wanted: Tensor, wide: float, narrow: float) -> None:
    """Check a result to the tolerance of its type; `wanted` may be of a wider type."""
    tolerance = wide if got.dtype == torch.float32 else narrow
    torch.testing.assert_close(got.to(wanted.dtype).cpu(), wanted, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Attention:
    """The shapes of a call; the seed draws lengths, which include 0 and the capacity."""

    batch: int
    heads: int
    tokens: int
    fresh: int
    rank: int
    rope: int
    capacity: int
    dtype: torch.dtype
    splits: int | None
    shared: int | None  # None: the GPU's own
    least: int
    seed: int


@st.composite
def attentions(draw: Draw) -> Attention:
    tokens = draw(st.integers(1, 16))
    return Attention(
        batch=draw(st.integers(1, 3)),
        heads=draw(st.sampled_from([1, 3, 8])),
        tokens=tokens,
        fresh=tokens + draw(st.integers(0, 3)),
        rank=draw(st.sampled_from([5, 16, 24, 130])),
        rope=draw(st.sampled_from([2, 16])),
        capacity=draw(st.integers(1, 90)),
        dtype=draw(DTYPES),
        splits=draw(st.sampled_from([None, 1, 2, 5])),
        shared=draw(st.sampled_from([AOT_SHARED, 1 << 20])),
        least=draw(st.sampled_from([1, 20, 64])),
        seed=draw(SEEDS),
    )


def check_attention(case: Attention, device: str) -> None:
    from mtpbuild.plugins.mla_attention.triton import mla_attention_launches

    g = torch.Generator().manual_seed(case.seed)
    B, T, C = case.batch, case.tokens, case.rank + case.rope
    q = torch.randn(B, case.heads, T, C, generator=g).to(case.dtype)
    cache = torch.randn(B, 1, case.capacity, C, generator=g).to(case.dtype)
    fresh = torch.randn(B, 1, case.fresh, C, generator=g).to(case.dtype)
    base = torch.randint(0, case.capacity + 1, (B,), generator=g)
    base[case.seed % B] = (0, case.capacity)[case.seed % 2]
    first = torch.randint(0, case.fresh - T + 1, (B,), generator=g)
    wide = (cache.float(), fresh.float())
    wanted = mla_attention(q.float(), *wide, base, first, 0.2, case.rank)

    for b in range(B):  # rows that no query sees may hold anything
        cache[b, :, int(base[b]) :] = float("nan")
        fresh[b, :, int(first[b]) + T :] = float("nan")
    q, cache, fresh, base, first = on(device, (q, cache, fresh, base, first))
    before = cache.view(torch.uint8).clone()
    launches = mla_attention_launches(
        *(q, cache, fresh, base, first, 0.2, case.rank),
        splits=case.splits,
        shared=case.shared,
        least=case.least,
    )
    got = launches.run()
    assert got.dtype == case.dtype
    assert torch.equal(cache.view(torch.uint8), before)
    check_close(got, wanted, 1e-5, 3e-2)


def check_kv_write(seed: int, device: str, width: int = 6) -> None:
    g = torch.Generator().manual_seed(seed)
    B, S, T = 3, 20, 1 + seed % 5
    cache, rows = torch.randn(B, 1, S, width, generator=g), torch.randn(B, 1, T, width, generator=g)
    start = torch.randint(0, S - T + 1, (B,), generator=g)
    start[seed % B] = (0, S - T)[seed % 2]
    from mtpbuild.plugins.kv_write.triton import kv_launch, kv_write_triton

    wanted = kv_write(cache, rows, start)
    operands = on(device, (cache, rows, start))
    assert torch.equal(kv_write_triton(*operands).cpu(), wanted)
    assert torch.equal(operands[0].cpu(), cache)  # the op must not change its operand
    kv_launch(*operands).run()
    assert torch.equal(operands[0].cpu(), wanted)


def check_greedy(seed: int, vocab: int, drafts: int, device: str) -> int:
    """Check logits of few levels: ties and right drafts are frequent. Return the largest n."""
    from mtpbuild.plugins.accept_rewind import triton as kernels

    g = torch.Generator().manual_seed(seed)
    B, T = 4, drafts + 1
    logits = torch.randint(0, 3, (B, T, vocab), generator=g).float()
    window = torch.randint(-1, vocab, (B, T), generator=g)
    right = torch.rand(B, T, generator=g) < 0.7
    window = torch.where(right, logits.argmax(-1).roll(1, dims=1), window)
    num_drafts = torch.randint(0, T, (B,), generator=g)
    lengths = torch.randint(0, 500, (B,), generator=g)
    active = torch.rand(B, generator=g) < 0.8
    operands = (logits, window, num_drafts, lengths, active)
    wanted = accept_rewind(*operands)
    there = on(device, operands)
    best = kernels.best_of_blocks_triton(there[0])
    torch.testing.assert_close(best.cpu(), best_of_blocks(logits))
    again = kernels.accept_best_triton(best, *there[1:])
    for got in (kernels.accept_rewind_triton(*there), again):
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.cpu(), b)
    return int(wanted[1].max())


@dataclass(frozen=True)
class Mixed:
    """Operands of `accept_mixed`, by name."""

    logits: Tensor
    window: Tensor
    num_drafts: Tensor
    lengths: Tensor
    active: Tensor
    thinking: Tensor
    draft_probs: Tensor
    asked: Controls

    def to(self, device: str) -> "Mixed":
        return Mixed(*tree_map(lambda tensor: tensor.to(device), [*vars(self).values()]))

    @property
    def operands(self) -> tuple[Any, ...]:
        """Return the op's operands in their order."""
        *slots, asked = vars(self).values()
        return *slots, list_controls(asked)


def asked_of(slots: int, nextn: int = 0, **own: Tensor) -> dict[str, Tensor]:
    """Make the controls of strict greedy requests, without penalties, changed by `own`."""
    return _asked(slots, GREEDY, CORE_CONTROLS, nextn) | own


def asked_of_penalties(slots: int, controls: StepControls) -> dict[str, Tensor]:
    """Repeat a request's penalties and biases for each slot, without room for more biases."""
    asked = _asked(slots, controls, [control for control in CONTROLS if not control.core])
    room = max(len(controls.bias_ids), 1)
    return asked | {name: asked[name][:, :room] for name in ("bias_ids", "bias_values")}


def _asked(
    slots: int, controls: StepControls, table: Sequence[Control], nextn: int = 0
) -> dict[str, Tensor]:
    shapes = list_control_shapes(nextn, positions=1)
    rows = controls.rows({c.name: (shapes[c.name], c.dtype) for c in table})
    every = {name: torch.from_numpy(row).expand(slots, *row.shape) for name, row in rows}
    return {name: tensor.clone() for name, tensor in every.items()}


def random_mixed(seed: int, vocab: int, drafts: int, slots: int = 6) -> Mixed:
    """Draw a mode and filters for every slot; drafts are often good."""
    g = torch.Generator().manual_seed(seed)
    B, T, V = slots, drafts + 1, vocab

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (B,), generator=g)]

    def chance(p: float, *shape: int) -> Tensor:
        return torch.rand(B, *shape, generator=g) < p

    logits = torch.randn(B, T, V, generator=g) * 2
    q = (logits[:, :drafts] + torch.randn(B, drafts, V, generator=g)).softmax(-1)
    drawn = q.flatten(0, 1).multinomial(1, generator=g).view(B, drafts) if drafts else None
    window = torch.randint(0, V, (B, T), generator=g)
    if drawn is not None:
        window[:, 1:] = torch.where(chance(0.6, drafts), logits[:, :drafts].argmax(-1), drawn)
        window[:, 1:][chance(0.05, drafts)] = -1
    top_k = torch.randint(1, V + 3, (B,), generator=g)
    synthetic = torch.where(chance(0.15)[:, None], torch.rand(B, T, generator=g), -1.0)
    synthetic[:, -1] = -1.0
    asked = asked_of(
        B,
        temperature=pick(0.0, 0.6, 1.0, 1.7),
        top_k=torch.where(chance(0.5), top_k, 0),
        top_p=pick(1.0, 0.9, 0.5, 1e-6),
        min_p=pick(0.0, 0.0, 0.1, 1.0),
        rejection=chance(0.6),
        block=chance(0.5),
        synthetic=synthetic,
        relaxed_topk=pick(1, 3, 10).long(),
        relaxed_delta=pick(0.0, 0.1, 0.6),
        thinking_ids=torch.tensor([[1, 2]] * B),
        banned_ids=torch.randint(-1, V, (B, 2), generator=g),
        banned_until=torch.randint(0, 14, (B,), generator=g),
        uniforms=torch.rand(B, 3 + max(drafts - 1, 0), 12 + T, generator=g),
    )
    return Mixed(
        logits,
        window,
        torch.randint(0, T, (B,), generator=g),
        torch.randint(3, 10, (B,), generator=g),
        chance(0.9),
        chance(0.5),
        q,
        asked,
    )


def check_mixed(case: Mixed, device: str) -> Tensor:
    """Check every figure of the verdict; return the reference's tokens."""
    from mtpbuild.plugins.accept_mixed.triton import accept_mixed_launches

    wanted = accept_mixed_op(*case.operands)
    got = accept_mixed_launches(*case.to(device).operands).run()
    names = ("tokens", "n", "lengths", "logprobs", "thinking", "margins")
    for name, a, b in zip(names, got, wanted, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.allclose(a.cpu(), b, rtol=1e-4, atol=2e-5), f"{name}: {a}, wanted {b}"
    return wanted[0]


def check_rows_of_nan(vocab: int, device: str) -> None:
    """Check that a slot's NaN leave other slots alone, name a token, and show in its figures."""
    from mtpbuild.plugins.accept_mixed.triton import accept_mixed_launches
    from mtpbuild.plugins.accept_rewind.triton import accept_rewind_triton

    case = random_mixed(4, vocab, 2, slots=3)
    case.active[:] = True
    slots = case.operands[1:5]
    wanted = accept_rewind(case.logits, *slots), accept_mixed_op(*case.operands)
    for damaged in (slice(None), slice(vocab - 1, None)):  # a whole row, or its last logit
        case.logits[1, :, damaged] = float("nan")
        greedy = accept_rewind_triton(*on(device, (case.logits, *slots)))
        mixed = accept_mixed_launches(*case.to(device).operands).run()
        for got, right in zip((greedy, mixed), wanted, strict=True):
            tokens, n, _, logprobs = (x.cpu() for x in got[:4])
            assert 1 <= n[1] <= 3
            assert (tokens[1, : n[1]] >= 0).all()
            assert (tokens < vocab).all()
            assert not logprobs[1, : n[1]].isfinite().any()
            for i in (0, 2):
                assert torch.equal(tokens[i], right[0][i])
                torch.testing.assert_close(logprobs[i], right[3][i])


def check_routes_of_nan(device: str) -> None:
    """Check that a token of NaN is sent to experts that there are, and no other one changes."""
    from mtpbuild.plugins.moe.triton import moe_route_triton, moe_triton

    for experts, groups, kept in ((12, 1, 1), (16, 1, 1), (12, 3, 2), (16, 4, 2)):
        g = torch.Generator().manual_seed(experts + groups)
        logits, bias = torch.randn(3, experts, generator=g), torch.randn(experts, generator=g)
        x, down = torch.randn(3, 8, generator=g), torch.randn(experts + 1, 4, 8, generator=g)
        gate_up = torch.randn(experts + 1, 8, 8, generator=g)
        settings = (groups, kept, 3, True, 1.0, 1)
        wanted = moe_route(logits, bias, *settings)
        right = moe(x, *wanted, gate_up, down)
        logits[1] = x[1] = float("nan")
        given = on(device, (logits, bias, x, gate_up, down))
        weights, ids = (found.cpu() for found in moe_route_triton(*given[:2], *settings))
        assert ((ids >= 0) & (ids < experts)).sum(1).tolist() == [3, 3, 3]
        assert (ids[:, 3] == experts).all()
        y = moe_triton(given[2], weights.to(device), ids.to(device), *given[3:]).cpu()
        assert y[1].isnan().all()
        assert torch.equal(ids[::2], wanted[1][::2])
        torch.testing.assert_close(y[::2], right[::2], rtol=1e-4, atol=1e-4)


def check_filters(case: Mixed, device: str) -> None:
    """Check the tokens that top-k, top-p and min-p leave, found without sorting."""
    from mtpbuild.plugins.accept_mixed.triton import accept_mixed_launches

    wanted = shaped_probs(case.logits, *list_shaping(case.asked)).flatten(0, 1)
    for law in accept_mixed_launches(*case.to(device).operands).each:
        law.run()
        if law.kernel.__name__ == "law_of_row":
            break
    top, floor, norm = law.outputs[0].cpu()[:, :3].T[..., None]
    temperature = case.asked["temperature"].repeat_interleave(case.logits.shape[1])[:, None]
    x = case.logits.flatten(0, 1) - top
    weights = (x / torch.where(temperature > 0, temperature, 1.0)).exp()
    got = torch.where(weights >= floor * (1 - 1e-6), weights, 0.0) / norm  # exp differs a bit
    assert torch.equal(got > 0, wanted > 0)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def check_flags(case: Mixed, device: str) -> None:
    """Check that verdicts don't change if bools are int32, as in TensorRT's plugins."""
    from mtpbuild.plugins.accept_mixed.triton import accept_mixed_launches

    flags = case.to(device).operands
    numbers = tree_map(lambda x: x.int() if x.dtype == torch.bool else x, flags)
    output = [accept_mixed_launches(*operands).run() for operands in (flags, numbers)]
    assert output[1][4].dtype == torch.int32
    for got, wanted in zip(output[1], output[0], strict=True):
        assert torch.equal(got.to(wanted.dtype), wanted)


def check_shaped_probs(
    seed: int, vocab: int, tokens: int, device: str, coldest: float | None = None
) -> None:
    """Check that the kernel of `shaped_probs` keeps the same tokens and probabilities."""
    from mtpbuild.plugins.shaped_probs.triton import shaped_probs_launches

    case = random_mixed(seed, vocab, tokens - 1, slots=8)
    if coldest is not None:
        case.asked["temperature"].fill_(coldest)
    wanted = shaped_probs(case.logits, *list_shaping(case.asked))
    moved = case.to(device)
    got = shaped_probs_launches(moved.logits, *list_shaping(moved.asked)).run().cpu()
    assert torch.equal(got > 0, wanted > 0)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@dataclass(frozen=True)
class Experts:
    tokens: int
    experts: int
    groups: int
    kept_groups: int
    chosen: int
    hidden: int
    inner: int
    limit: float
    dtype: torch.dtype
    seed: int


@st.composite
def expert_choices(draw: Draw) -> Experts:
    groups, size = draw(st.sampled_from([(1, 6), (2, 4), (4, 3), (3, 2)]))
    kept = draw(st.integers(1, groups))
    return Experts(
        tokens=draw(st.sampled_from([1, 2, 5, 17])),
        experts=groups * size,
        groups=groups,
        kept_groups=kept,
        chosen=draw(st.integers(1, min(3, kept * size))),
        hidden=draw(st.sampled_from([8, 70])),
        inner=draw(st.sampled_from([4, 66])),
        limit=draw(st.sampled_from([0.0, 0.5])),
        dtype=draw(DTYPES),
        seed=draw(SEEDS),
    )


def check_moe(case: Experts, device: str) -> None:
    from mtpbuild.plugins.moe.triton import moe_route_triton, moe_triton

    g = torch.Generator().manual_seed(case.seed)
    N, X, E, inner = case.tokens, case.experts, case.hidden, case.inner
    logits = torch.randn(N, X, generator=g)
    bias = torch.randn(X, generator=g) * 0.3
    settings = (case.groups, case.kept_groups, case.chosen, bool(case.seed % 2), 2.5)
    weights, ids = moe_route(logits, bias, *settings)
    got = moe_route_triton(logits.to(device), bias.to(device), *settings)
    torch.testing.assert_close(got[0].cpu(), weights)
    assert torch.equal(got[1].cpu(), ids)
    parts = torch.randn(3, 1, N, X, generator=g)
    apart = moe_route_triton(parts.to(device), bias.to(device), *settings)
    whole = moe_route(parts[0] + parts[1] + parts[2], bias, *settings)  # in the kernel's order
    torch.testing.assert_close(apart[0].cpu(), whole[0])
    assert torch.equal(apart[1].cpu(), whole[1])

    x = torch.randn(N, E, generator=g).to(case.dtype)
    gate_up = (torch.randn(X, E, 2 * inner, generator=g) / E**0.5).to(case.dtype)
    down = (torch.randn(X, inner, E, generator=g) / inner**0.5).to(case.dtype)
    more = *4 * [None], 0, False, case.limit
    wanted = moe(x.float(), weights, ids, gate_up.float(), down.float(), *more)
    y = moe_triton(*on(device, (x, weights, ids, gate_up, down)), *more)
    assert y.dtype == case.dtype
    check_close(y, wanted, 1e-4, 5e-2)

    # Experts of other ranks, and ids that repeat within a token; the kernels write every row.
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.3, NO_EXPERT, ids)
    ids[::2, -1] = ids[::2, 0]
    wanted = moe_by_hand(x.float(), weights, ids, gate_up.float(), down.float(), case.limit)
    y = moe(x.float(), weights, ids, gate_up.float(), down.float(), *more)
    torch.testing.assert_close(y, wanted)
    with uninitialised_memory_is_nan():
        y = moe_triton(*on(device, (x, weights, ids, gate_up, down)), *more)
    check_close(y, wanted, 1e-4, 5e-2)


def moe_by_hand(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, limit: float
) -> Tensor:
    """Sum token by token and expert by expert, as the op's docstring defines it."""
    y = torch.zeros_like(x)
    for n, k in itertools.product(*map(range, ids.shape)):
        if (expert := int(ids[n, k])) != NO_EXPERT:
            gate, up = (x[n] @ gate_up[expert]).chunk(2)
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            y[n] += weights[n, k] * ((torch.nn.functional.silu(gate) * up) @ down[expert])
    return y


@contextlib.contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Fill new memory with NaN, so that no test passes because an unwritten row holds zeros."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


Scaled = tuple[Tensor, Tensor, Tensor | None]


def random_scaled(
    g: torch.Generator, form: str, *shape: int, by_input: bool = False, size: float = 1.0
) -> Scaled:
    """Draw a weight in which every code occurs and values are about as large as `size`."""
    *stack, K, N = shape

    def codes(rows: int, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (*stack, rows, N), generator=g).to(torch.uint8)

    def factors(*of: int, typical: float) -> Tensor:
        return (0.5 + torch.rand(*stack, *of, generator=g)) * size / typical

    if form == "fp8":
        values = codes(K, 0, 256)
        values[(values & 0x7F) == 0x7F] = 0x07  # NaN -> a subnormal
        return values, factors(K // gcd(128, K), N, typical=100), None
    second = factors(K // 16, 1, typical=10) if by_input else factors(1, N, typical=10)
    return codes(K // 2, 0, 256), codes(K // 16, 0, 0x48), second


@dataclass(frozen=True)
class Product:
    form: str
    tokens: int
    inputs: int
    outputs: int
    by_input: bool
    dtype: torch.dtype
    seed: int


@st.composite
def products(draw: Draw) -> Product:
    return Product(
        form=draw(st.sampled_from(["fp8", "nvfp4"])),
        tokens=draw(st.sampled_from([1, 3, 17, 64, 70])),
        inputs=draw(st.sampled_from([16, 48, 144, 256])),
        outputs=draw(st.sampled_from([1, 20, 70, 300])),
        by_input=draw(st.booleans()),
        dtype=draw(DTYPES),
        seed=draw(SEEDS),
    )


def check_product(case: Product, device: str) -> None:
    from mtpbuild.plugins.matmul_scaled.triton import few_rows, matmul_scaled_triton

    g = torch.Generator().manual_seed(case.seed)
    K, N = case.inputs, case.outputs
    x = torch.randn(1, case.tokens, K, generator=g).to(case.dtype)
    weight = random_scaled(g, case.form, K, N, by_input=case.by_input, size=K**-0.5)
    wanted = matmul_scaled(x, *weight)
    for kernel in (matmul_scaled_triton, few_rows):  # with few tokens the first one uses the kernel
        y = kernel(*on(device, (x, *weight)))
        assert (y.dtype, y.shape) == (case.dtype, wanted.shape)
        check_close(y, wanted, 1e-4, 3e-2)


def check_wide_product(seed: int, device: str) -> None:
    """Check that a bf16 head's logits choose the same tokens as exact ones, without ties.

    There are so many rows that some would tie if logits were rounded to bf16, and fail the check.
    """
    from mtpbuild.plugins.matmul_wide.triton import matmul_parts, matmul_wide_triton

    def summed_parts(x: Tensor, weight: Tensor) -> Tensor:
        return matmul_parts(x, weight).sum(0)

    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 40, 64, generator=g).bfloat16()
    weight = torch.randn(64, 4000, generator=g).bfloat16()
    exact = x.double() @ weight.double()
    first, second = exact.bfloat16().topk(2).values.unbind(-1)
    assert (first == second).any()
    for product in (matmul_wide, matmul_wide_triton, summed_parts):
        got = product(x.to(device), weight.to(device)).cpu()
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)
        first, second = got.topk(2).values.unbind(-1)
        assert not (first == second).any()
        assert torch.equal(got.argmax(-1), exact.argmax(-1))
    x, weight = torch.randn(2, 3, 600, generator=g), torch.randn(600, 40, generator=g)  # a router's
    parts = matmul_parts(x.to(device), weight.to(device))
    assert parts.shape == (2, 2, 3, 40)
    check_close(parts.sum(0), x.double() @ weight.double(), 1e-5, 0)


def check_scaled_moe(
    seed: int, forms: tuple[str, str], dtype: torch.dtype, device: str, tokens: int = 5
) -> None:
    """Check experts whose two products are in the formats `forms`."""
    from mtpbuild.plugins.moe.triton import moe_triton

    g = torch.Generator().manual_seed(seed)
    N, X, E, inner = tokens, 6, 80, 48
    x = torch.randn(N, E, generator=g).to(dtype)
    weights = torch.rand(N, 2, generator=g)
    ids = torch.randn(N, X, generator=g).topk(2).indices.int()
    gate_up, *scales = scaled_or_plain(g, forms[0], dtype, X, E, 2 * inner)
    down, *others = scaled_or_plain(g, forms[1], dtype, X, inner, E)
    operands = (x, weights, ids, gate_up, down, *scales, *others)
    wanted = moe(*operands)
    y = moe_triton(*on(device, operands))
    assert y.dtype == dtype
    check_close(y, wanted, 1e-4, 5e-2)
    last = moe_triton(*on(device, (x[-1:], weights[-1:], ids[-1:], *operands[3:])))
    assert torch.equal(y[-1:], last)  # a token's sums don't depend on other tokens


def scaled_or_plain(
    g: torch.Generator, form: str, dtype: torch.dtype, *shape: int
) -> tuple[Any, Any, Any]:
    size = shape[-2] ** -0.5
    if form == "plain":
        return (torch.randn(*shape, generator=g) * size).to(dtype), None, None
    return random_scaled(g, form, *shape, size=size)
