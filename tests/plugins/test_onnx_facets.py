"""Oracle O8: each op's ONNX facet, run by onnxruntime, equals its PyTorch reference."""

import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch._C import _dispatch_get_all_op_names
from torch.export import Dim

from mtpbuild.builder.targets.onnxruntime.lowering import OPSET
from mtpbuild.builder.targets.onnxruntime.pipeline import CPU, PORTABLE
from mtpbuild.builder.targets.onnxruntime.quick_export import export_quickly
from mtpbuild.plugins import (
    NODE_FACETS,
    accept_rewind,
    choose_rows,
    experts,
    facets,
    grouped_attention,
    index_keys,
    kv_write,
    mla_attention,
    rope,
)
from mtpbuild.plugins.mla_attention.op import FLOOR, floored_softmax
from tests.support.choosers import operands

GARBAGE = 1e20  # in every row that must not count: it weighs 1e-32 (`floored_softmax`)
Op = Callable[..., Any]


class Calls(nn.Module):
    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, *inputs: Tensor) -> Any:
        return self.op(*inputs)


class Facet:
    """An op exported as `builder/targets/onnxruntime.py` does, beside its reference."""

    def __init__(
        self,
        op: Op,
        example: Sequence[Tensor],
        varying: Mapping[int, Any] | None = None,
        threads: int = 1,
    ) -> None:
        self.op = op
        example = [tensor.clone() for tensor in example]  # one tensor given twice is one input
        shapes = tuple((varying or {}).get(i) for i in range(len(example)))
        for noisy in ("torch.onnx", "onnx_ir"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.no_grad(), export_quickly():
            warnings.simplefilter("ignore")
            exported = torch.export.export(Calls(op), tuple(example), dynamic_shapes=(shapes,))
            program = torch.onnx.export(
                exported,
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                custom_translation_table=facets(PORTABLE.ops),
            )
        assert program is not None
        self.model = onnx.load_from_string(program.model_proto.SerializeToString())
        onnx.checker.check_model(self.model, full_check=True)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        providers = ["CPUExecutionProvider"]
        self.session = ort.InferenceSession(
            self.model.SerializeToString(), options, providers=providers
        )

    @property
    def ops(self) -> list[str]:
        return [node.op_type for node in self.model.graph.node]

    def run(self, *inputs: Tensor) -> list[Tensor]:
        names = [value.name for value in self.session.get_inputs()]
        feed = {name: t.numpy() for name, t in zip(names, inputs, strict=True)}
        return [torch.from_numpy(array) for array in self.session.run(None, feed)]

    def check(self, *inputs: Tensor, exact: bool = False) -> list[Tensor]:
        got, wanted = self.run(*inputs), self.op(*inputs)
        wanted = [wanted] if isinstance(wanted, Tensor) else list(wanted)
        tolerance = 0.0 if exact else 2e-5
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == b.dtype
            assert bool(torch.isfinite(a).all()) or not a.is_floating_point()
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        return got


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_every_op_has_a_facet() -> None:
    registered = {name for name in _dispatch_get_all_op_names() if name.startswith("mtpbuild::")}
    assert {"mtpbuild::kv_write", "mtpbuild::mla_attention"} <= registered
    others = ("moe", "accept_mixed", "matmul_scaled", "matmul_wide")
    fused = ("gated_product", "mla_queries", "mla_values")
    of_gpus = ("balance_streams",)
    of_ranks = ("best_of_blocks", "accept_best", "sum_of_ranks")
    names = (*others, *fused, *of_gpus, *of_ranks)
    elsewhere = {f"mtpbuild::{name}" for name in names}
    written = {op.name() for op in facets({**NODE_FACETS, **CPU.ops})}
    assert written == registered - elsewhere


def test_kv_write() -> None:
    S = Dim("S", min=8, max=64)
    example = (torch.zeros(3, 1, 9, 5), torch.zeros(3, 1, 4, 5), ints(0, 0, 0))
    facet = Facet(kv_write, example, {0: {2: S}})
    assert facet.ops == ["TensorScatter"]
    rng = np.random.default_rng(0)
    for rows in (8, 9, 33, 64):
        cache, new = torch.randn(3, 1, rows, 5), torch.randn(3, 1, 4, 5)
        for start in (ints(0, rows - 4, 1), *torch.from_numpy(rng.integers(0, rows - 3, (5, 3)))):
            (out,) = facet.check(cache, new, start, exact=True)
            for b, at in enumerate(start.tolist()):
                assert torch.equal(out[b, :, at : at + 4], new[b])


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("heads", "interleaved"),
    [(3, True), (1, False), *(pytest.param(*c, marks=FULL) for c in ((1, True), (3, False)))],
)
def test_rope(interleaved: bool, heads: int) -> None:
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(x, cos, sin, heads, interleaved)

    B, R, T = 2, 6, Dim("T", min=1, max=64)
    example = (torch.zeros(B, 7, heads * R), torch.zeros(B, 7, R // 2), torch.zeros(B, 7, R // 2))
    facet = Facet(rotated, example, {i: {1: T} for i in range(3)})
    for tokens in (1, 2, 17, 64):
        angles = torch.rand(B, tokens, R // 2) * 100
        facet.check(torch.randn(B, tokens, heads * R), angles.cos(), angles.sin())


def test_rope_of_a_part_of_each_head() -> None:
    """Values behind the rotated ones pass."""

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(x, cos, sin, 3, False)

    heads, W, R, T = 3, 10, 4, Dim("T", min=1, max=64)
    example = (torch.zeros(2, 7, heads * W), torch.zeros(2, 7, R // 2), torch.zeros(2, 7, R // 2))
    facet = Facet(rotated, example, {i: {1: T} for i in range(3)})
    angles, x = torch.rand(2, 17, R // 2) * 100, torch.randn(2, 17, heads * W)
    (out,) = facet.check(x, angles.cos(), angles.sin())
    whole, given = out.unflatten(-1, (heads, W)), x.unflatten(-1, (heads, W))
    assert torch.equal(whole[..., R:], given[..., R:])
    turned = rope(given[..., :R].flatten(-2), angles.cos(), angles.sin(), heads, False)
    torch.testing.assert_close(whole[..., :R].flatten(-2), turned)


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize(
    ("heads", "groups", "tokens"),
    [(6, 2, 4), *(pytest.param(*sizes, marks=FULL) for sizes in ((3, 3, 2), (4, 1, 1)))],
)
def test_grouped_attention(written: bool, heads: int, groups: int, tokens: int) -> None:
    """It attends to a cache that was just written to, or to cache and fresh rows side by side."""

    def attention(q: Tensor, cache: Tensor, fresh: Tensor, base: Tensor, first: Tensor) -> Tensor:
        if written:
            cache = kv_write(cache, fresh, base)
        return grouped_attention(q, cache, fresh, base, first, SCALE, groups)

    B, D, S = 2, 4, Dim("S", min=12, max=96)
    width, zeros = 2 * groups * D, ints(0, 0)

    def sizes(capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        shapes = (B, heads, tokens, D), (B, 1, capacity, width), (B, 1, tokens, width)
        return torch.randn(shapes[0]), torch.randn(shapes[1]), torch.randn(shapes[2])

    facet = Facet(attention, (*sizes(13), zeros, zeros), {1: {2: S}})
    assert facet.ops.count("Softmax") == 1
    assert facet.ops.count("MatMul") == (2 if written else 4)
    for capacity in (12, 40, 96):
        q, cache, fresh = sizes(capacity)
        base = ints(capacity - tokens, 3)
        for b in range(B):
            cache[b, :, int(base[b]) :] = GARBAGE
        facet.check(q, cache, fresh, base, zeros)


def test_rope_turns_pairs() -> None:
    """The reference itself: a quarter turn takes (a, b) to (-b, a)."""
    x, zero, one = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    assert rope(x, zero, one, 1, True).flatten().tolist() == [-2, 1, -4, 3]
    assert rope(x, zero, one, 1, False).flatten().tolist() == [-3, -4, 1, 2]


SCALE, RANK = 0.37, 6  # C = 8: 6 latent values and 2 of the rotary key


def fresh_in_cache(
    q: Tensor, cache: Tensor, fresh: Tensor, base: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    cache = kv_write(cache, fresh, base)
    return mla_attention(q, cache, fresh, base, first, SCALE, RANK), cache


def fresh_beside_cache(
    q: Tensor, cache: Tensor, fresh: Tensor, base: Tensor, first: Tensor
) -> tuple[Tensor, ...]:
    return (mla_attention(q, cache, fresh, base, first, SCALE, RANK),)


def written_elsewhere(
    q: Tensor, cache: Tensor, fresh: Tensor, base: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """Check rows at base that are not the fresh ones: one block would read the wrong rows."""
    cache = kv_write(cache, fresh * 2 + 1, base)
    return mla_attention(q, cache, fresh, base, first, SCALE, RANK), cache


def plain_attention(q: Tensor, cache: Tensor, fresh: Tensor, base: Tensor, first: Tensor) -> Tensor:
    """Query by query, from the definition: only the rows that it may see are touched."""
    out = q.new_empty(*q.shape[:3], RANK)
    for b, h, t in np.ndindex(*q.shape[:3]):
        last = int(first[b]) + t
        rows = torch.cat([cache[b, 0, : int(base[b])], fresh[b, 0, : last + 1]])
        p = (rows @ q[b, h, t] * SCALE).softmax(0)
        out[b, h, t] = p @ rows[:, :RANK]
    return out


ATTENTION = [
    # op, heads, fresh rows, query tokens, score blocks (products of scores)
    (fresh_in_cache, 4, 4, 4, 1),
    (fresh_in_cache, 1, 3, 1, 1),  # only the newest row of each slot attends
    (fresh_beside_cache, 4, 2, 1, 2),  # Eagle's later drafts
    (fresh_beside_cache, 3, 5, 5, 2),
    (written_elsewhere, 2, 3, 3, 2),
]


@pytest.mark.parametrize(("op", "heads", "rows", "tokens", "blocks"), ATTENTION)
def test_mla_attention(op: Op, heads: int, rows: int, tokens: int, blocks: int) -> None:
    B, C, S = 3, 8, Dim("S", min=12, max=96)
    zeros = ints(*[0] * B)

    def sizes(capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        shapes = (B, heads, tokens, C), (B, 1, capacity, C), (B, 1, rows, C)
        return torch.randn(shapes[0]), torch.randn(shapes[1]), torch.randn(shapes[2])

    facet = Facet(op, (*sizes(13), zeros, zeros), {1: {2: S}})
    assert facet.ops.count("Softmax") == 1
    assert facet.ops.count("MatMul") == 2 * blocks
    rng = np.random.default_rng(heads)
    for capacity in (12, 13, 40, 96):
        for _ in range(6):
            q, cache, fresh = sizes(capacity)
            base = torch.from_numpy(rng.integers(0, capacity - rows + 1, B))
            base[rng.integers(B)] = rng.choice([0, capacity - rows])
            first = torch.from_numpy(rng.integers(0, rows - tokens + 1, B))
            for b in range(B):
                cache[b, :, int(base[b]) :] = GARBAGE
                if op is not written_elsewhere:
                    fresh[b, :, int(first[b]) + tokens :] = GARBAGE
            mixed = facet.check(q, cache, fresh, base, first)[0]
            wanted = plain_attention(q, cache, fresh, base, first)
            torch.testing.assert_close(mixed, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("interleaved", [True, False])
def test_index_keys(interleaved: bool) -> None:
    def keys(*given: Tensor) -> Tensor:
        return index_keys(*given, 1e-6, interleaved)

    T = Dim("T", min=1, max=64)
    example = (torch.zeros(2, 7, 10), *torch.zeros(2, 10), *torch.zeros(2, 2, 7, 2))
    facet = Facet(keys, example, {i: {1: T} for i in (0, 3, 4)})
    for tokens in (1, 17):
        angles = torch.rand(2, tokens, 2) * 100
        a, norms = torch.randn(2, tokens, 10) + 3, torch.randn(2, 10)
        facet.check(a, *norms, angles.cos(), angles.sin())


@pytest.mark.full
@pytest.mark.parametrize(
    ("written", "interleaved"),
    [
        (True, False),
        (False, True),
        *(pytest.param(each, each, marks=FULL) for each in (True, False)),
    ],
)
def test_attention_to_chosen_rows(written: bool, interleaved: bool) -> None:
    """Positions are the reference's, ties included; fewer rows than may be chosen, and more."""
    T, C, heads = 2, 12, 3

    def attention(q: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        *asked, cache, fresh, base, first = given
        chosen = choose_rows(*asked, cache, fresh, base, first, 6, interleaved)
        if written:
            cache = kv_write(cache, fresh, base)
        return chosen, mla_attention(q, cache, fresh, base, first, SCALE, RANK, chosen)

    S = Dim("S", min=3, max=96)
    queries = torch.randn(3, heads, T, C)
    example = operands(0, 3, T, 13, T).values()
    facet = Facet(attention, (queries, *example), {5: {2: S}})
    for rows, levels in itertools.product((3, 5, 40), (None, 2)):
        for seed in range(4):
            given = operands(seed, 3, T, rows, T, levels)
            given["base"].clamp_(max=rows - T)
            facet.check(queries, *given.values())


@pytest.mark.full
@pytest.mark.parametrize(("op", "heads", "rows", "tokens", "blocks"), ATTENTION)
def test_no_weight_is_subnormal(op: Op, heads: int, rows: int, tokens: int, blocks: int) -> None:
    """Sharp attention, half of the rows masked. A CPU computes with subnormals very slowly."""
    del blocks
    B, C, capacity = 2, 8, 200
    q = torch.randn(B, heads, tokens, C)
    cache, fresh = torch.randn(B, 1, capacity, C) * 40, torch.randn(B, 1, rows, C)
    given = q, cache, fresh, ints(100, 130), ints(0, rows - tokens)
    facet = Facet(op, given)
    (softmax,) = (node for node in facet.model.graph.node if node.op_type == "Softmax")
    facet.model.graph.output.append(onnx.ValueInfoProto(name=softmax.output[0]))
    session = ort.InferenceSession(facet.model.SerializeToString())
    feed = {v.name: t.numpy() for v, t in zip(session.get_inputs(), given, strict=True)}
    weights = session.run(None, feed)[-1]
    assert (weights >= np.finfo(np.float32).tiny).all()

    scores = (q @ cache.mT)[..., :100] * SCALE
    plain = scores.softmax(-1)
    assert ((plain > 0) & (plain < torch.finfo(torch.float32).tiny)).any()  # it would have some
    torch.testing.assert_close(floored_softmax(scores), plain, rtol=1e-6, atol=2 * FLOOR)


@pytest.mark.parametrize(
    ("K", "V"), [(0, 7), (3, 7), *(pytest.param(*c, marks=FULL) for c in ((1, 7), (3, 5000)))]
)
def test_accept_rewind(K: int, V: int) -> None:
    B, T = 4, K + 1
    rng = np.random.default_rng(K)
    active = torch.ones(B, dtype=torch.bool)
    zero = ints(*[0] * B)
    example = (torch.zeros(B, T, V), torch.zeros(B, T, dtype=torch.int64), zero, zero, active)
    facet = Facet(accept_rewind, example)
    seen = set[int]()
    for _ in range(60):
        # Few levels: ties are frequent, and drafts often right.
        logits = torch.from_numpy(rng.integers(0, 3, (B, T, V)).astype(np.float32))
        window = torch.from_numpy(rng.integers(-1, V, (B, T)))
        right = torch.from_numpy(rng.random((B, T)) < 0.7)
        window = torch.where(right, logits.argmax(-1).roll(1, dims=1), window)
        num_drafts = torch.from_numpy(rng.integers(0, K + 1, B))
        lengths = torch.from_numpy(rng.integers(0, 500, B))
        active = torch.from_numpy(rng.random(B) < 0.8)
        _, n, _, _, _ = facet.check(logits, window, num_drafts, lengths, active)
        assert bool((n[~active] == 0).all())
        seen |= set(n.tolist())
    assert seen == set(range(T + 1))


@pytest.mark.parametrize(
    ("X", "E", "inner"),
    [(20, 40, 24), *(pytest.param(*sizes, marks=FULL) for sizes in ((9, 96, 64), (3, 200, 136)))],
)
def test_experts(X: int, E: int, inner: int) -> None:
    """One node reads the weights; a row's result is its own, to the bit, however threads share."""
    N = 37
    gate_up, down = torch.randn(X, 2 * inner, E) / E**0.5, torch.randn(X, E, inner) / inner**0.5
    rows, ids = torch.randn(N, E), torch.randint(0, X, (N,))
    ids[:17], ids[17] = 1, 0  # an expert of many rows
    ids[18:] += ids[18:] == 0  # and one of a single row
    example, varying = (rows, ids, gate_up, down), {i: {0: Dim("rows")} for i in range(2)}
    got = []
    for threads in (1, 2):
        facet = Facet(experts, example, varying, threads)
        weights = {value.name for value in facet.model.graph.input[2:]}
        assert [n.op_type for n in facet.model.graph.node if weights & {*n.input}] == ["MoE"]
        got += facet.check(*example)
        for count in (1, 2, 3, 16, 18, 33):
            (some,) = facet.run(rows[:count], ids[:count], gate_up, down)
            assert torch.equal(some, got[0][:count])
        for i in range(N):
            (one,) = facet.run(rows[i : i + 1], ids[i : i + 1], gate_up, down)
            assert torch.equal(one, got[0][i : i + 1])
    assert torch.equal(*got)
