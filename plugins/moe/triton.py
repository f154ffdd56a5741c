"""moe in Triton: routing, then two products over the tokens of each expert that any token chose.

Each pair of a token and one of its experts has programs. The programs of an expert's first pair
compute all of its tokens; those of its other pairs return at once. So each chosen expert's weights
are read once, and nothing is sorted or gathered. A pair's row is zero if it has `NO_EXPERT`, or if
an earlier pair of the same token has the same expert.
"""

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from mtpbuild.plugins.definition import bind, empty_results
from mtpbuild.plugins.gated_product.triton import gate_by_silu
from mtpbuild.plugins.launch import Launch, Launches, cdiv, round_up_to_tile, run_launches
from mtpbuild.plugins.matmul_scaled.triton import sum_of_parts
from mtpbuild.plugins.moe.op import MAX_TOKENS, moe, moe_route, root_route
from mtpbuild.plugins.tiles import choose_tiles, count_splits, product_with_weight


@triton.jit
def route(
    logits, bias,
    tokens,
    weights, ids,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr, NORMALISE: tl.constexpr, FACTOR: tl.constexpr, ALWAYS: tl.constexpr,
    ROOTS: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_ROW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program n chooses CHOSEN experts for token n and appends the ALWAYS shared ones.

    Its logits are the sum of PARTS rows. ROOTS: scores are those of `root_route`. GROUP_ROWS,
    GROUP_ROW and WIDE are the numbers of groups, of a group's experts and of CHOSEN + ALWAYS,
    rounded up to powers of two.
    """
    n = tl.program_id(0)
    g, member = tl.arange(0, GROUP_ROWS)[:, None], tl.arange(0, GROUP_ROW)[None, :]
    x = g * (EXPERTS // GROUPS) + member
    there = (g < GROUPS) & (member < EXPERTS // GROUPS)
    apart = tokens * EXPERTS
    logit = sum_of_parts(logits + n * EXPERTS + x, there, apart, PARTS, tl.float32)
    biased = score_of(logit, ROOTS) + tl.load(bias + x, there, 0.0)
    biased = tl.where(there, biased, float("-inf"))
    if KEPT_GROUPS < GROUPS:
        first, at = tl.max(biased, 1, return_indices=True)
        second = tl.max(tl.where(member == at[:, None], float("-inf"), biased), 1)
        group = tl.arange(0, GROUP_ROWS)
        sums = first + second
        sums = tl.where(group < GROUPS, sums, float("-inf"))
        kept = tl.zeros((GROUP_ROWS,), tl.int32)
        for _ in tl.static_range(KEPT_GROUPS):
            best = tl.argmax(sums, 0)
            kept = tl.where(group == best, 1, kept)
            sums = tl.where(group == best, float("-inf"), sums)
        biased = tl.where((kept > 0)[:, None], biased, float("-inf"))
    every = tl.reshape(biased, (GROUP_ROWS * GROUP_ROW,))
    number = tl.arange(0, GROUP_ROWS * GROUP_ROW)
    k = tl.arange(0, WIDE)
    chosen = tl.zeros((WIDE,), tl.int32)
    for i in tl.static_range(CHOSEN):
        best = tl.argmax(every, 0)
        every = tl.where(number == best, float("-inf"), every)
        expert = best // GROUP_ROW * (EXPERTS // GROUPS) + best % GROUP_ROW
        chosen = tl.where(k == i, tl.minimum(expert, EXPERTS - 1), chosen)
    pointers = logits + n * EXPERTS + chosen
    weight = score_of(sum_of_parts(pointers, k < CHOSEN, apart, PARTS, tl.float32), ROOTS)
    weight = tl.where(k < CHOSEN, weight, 0.0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    to = n * (CHOSEN + ALWAYS) + k
    tl.store(weights + to, tl.where(k < CHOSEN, weight * FACTOR, 1.0), k < CHOSEN + ALWAYS)
    tl.store(ids + to, tl.where(k < CHOSEN, chosen, EXPERTS + k - CHOSEN), k < CHOSEN + ALWAYS)


@triton.jit
def score_of(x, ROOTS: tl.constexpr):
    """Return an expert's score for a logit: its sigmoid, or the root of its softplus."""
    if ROOTS:
        small = tl.exp(-tl.abs(x))
        grown = tl.where(small < 1e-4, small - 0.5 * small * small, tl.log(1 + small))
        score = tl.sqrt(tl.maximum(x, 0.0) + grown)
    else:
        score = tl.sigmoid(x)
    return score


@triton.jit
def pairs_of_tokens(
    count,
    CHOSEN: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return the indices of each token's pairs [TOKENS, WIDE], padded with `count`.

    The kernels load the ids themselves: if this function loaded them to compute an address, PyTorch
    would assume that it writes to them, and copy the tensor.
    """
    m, k = tl.arange(0, TOKENS)[:, None], tl.arange(0, WIDE)[None, :]
    p = m * CHOSEN + k
    return tl.where((p < count) & (k < CHOSEN), p, count)


@triton.jit
def rows_of_expert(pairs, count, BLOCK_M: tl.constexpr):
    """Count an expert's pairs; return 1 if one block always holds them, so that there's no loop."""
    if pairs.shape[0] <= BLOCK_M:
        number: tl.constexpr = 1
    else:
        number = tl.sum((pairs < count).to(tl.int32), 0)
    return number


@triton.jit
def next_rows(pairs, count, done, BLOCK_M: tl.constexpr):
    """Return the BLOCK_M pairs after the first `done`, padded with `count`, and marks of tokens.

    pairs [TOKENS]: each token's pair with the expert, or `count`. The marks [BLOCK_M, TOKENS] are
    true where a returned pair is the token's.
    """
    number = tl.cumsum((pairs < count).to(tl.int32), 0) - 1
    wanted = done + tl.arange(0, BLOCK_M)
    taken = (number[None, :] == wanted[:, None]) & (pairs < count)[None, :]
    return tl.min(tl.where(taken, pairs[None, :], count), 1), taken


@triton.jit
def gate_and_up(
    x, ids, gate_up_proj, scales, scales_2,
    count,
    sums,
    CHOSEN: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, BLOCK: tl.constexpr, BY_INPUT: tl.constexpr, WORDS: tl.constexpr,
    ASSEMBLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (p, i, s) multiplies x by column block i of gate and up, for the expert of pair p.

    It sums split s of the inputs, for BLOCK_M of the expert's pairs at a time.
    """
    pair, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    expert = tl.load(ids + pair).to(tl.int64)
    every = pairs_of_tokens(count, CHOSEN, WIDE, TOKENS)
    same = tl.load(ids + every, every < count, -1) == expert
    pairs = tl.min(tl.where(same, every, count), 1)  # each token's pair with this expert, or count
    if (expert >= 0) & (tl.min(pairs, 0) == pair):
        first = tl.program_id(1) * BLOCK_N
        n = first + tl.arange(0, BLOCK_N)
        share = tl.cdiv(tl.cdiv(HIDDEN, splits), BLOCK_K) * BLOCK_K
        start, end = split * share, tl.minimum(split * share + share, HIDDEN)
        for done in range(0, rows_of_expert(pairs, count, BLOCK_M), BLOCK_M):
            rows, _ = next_rows(pairs, count, done, BLOCK_M)
            total = product_with_weight(
                x, rows, count, gate_up_proj, scales, scales_2, expert, start, end, first, CHOSEN,
                HIDDEN, 2 * INNER, BLOCK, BY_INPUT, WORDS, ASSEMBLY, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
            to = sums + (split * count + rows)[:, None] * (2 * INNER) + n[None, :]
            tl.store(to, total, (rows < count)[:, None] & (n < 2 * INNER)[None, :])


@triton.jit
def gate_rows(
    sums, inner, rows, count,
    INNER: tl.constexpr, ROW: tl.constexpr, SPLITS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Write silu(gate) * up for the pairs `rows`; gates and ups are sums over SPLITS."""
    i = tl.arange(0, ROW)[None, :]
    there = (rows < count)[:, None] & (i < INNER)
    at = sums + rows[:, None] * (2 * INNER) + i
    gate, up = tl.load(at, there, 0.0), tl.load(at + INNER, there, 0.0)
    for s in tl.static_range(1, SPLITS):
        further = at + s * count * (2 * INNER)
        gate += tl.load(further, there, 0.0)
        up += tl.load(further + INNER, there, 0.0)
    gated = gate_by_silu(gate, up, LIMIT)
    tl.store(inner + rows[:, None] * INNER + i, gated.to(inner.dtype.element_ty), there)


@triton.jit
def down(
    sums, weights, ids, down_proj, scales, scales_2,
    count,
    inner, parts,
    CHOSEN: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, ROW: tl.constexpr, SPLITS: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK: tl.constexpr, BY_INPUT: tl.constexpr, WORDS: tl.constexpr, ASSEMBLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (p, i) computes column block i of the weighted outputs of the expert of pair p.

    Its inputs are silu(gate) * up of `gate_and_up`'s SPLITS sums. Each of the expert's programs
    computes them for itself and writes the same values to `inner`. ROW is INNER rounded up to a
    power of two.
    """
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int64)
    every = pairs_of_tokens(count, CHOSEN, WIDE, TOKENS)
    same = tl.load(ids + every, every < count, -1) == expert
    pairs = tl.min(tl.where(same, every, count), 1)
    first = tl.program_id(1) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    right = n < HIDDEN
    before = tl.arange(0, WIDE)
    earlier = tl.load(ids + pair // CHOSEN * CHOSEN + before, before < pair % CHOSEN, -1)
    if (expert < 0) | (tl.max((earlier == expert).to(tl.int32), 0) > 0):
        tl.store(parts + pair * HIDDEN + n, tl.zeros((BLOCK_N,), tl.float32), right)
    elif tl.min(pairs, 0) == pair:
        if TOKENS <= BLOCK_M:  # most experts have one token
            row = pair
            while row < count:
                gate_rows(sums, inner, row + tl.arange(0, 1), count, INNER, ROW, SPLITS, LIMIT)
                row = tl.min(tl.where(pairs > row, pairs, count), 0)
        else:
            for done in range(0, rows_of_expert(pairs, count, 4), 4):  # as registers allow
                rows, _ = next_rows(pairs, count, done, 4)
                gate_rows(sums, inner, rows, count, INNER, ROW, SPLITS, LIMIT)
        tl.debug_barrier()  # threads read what other threads have written
        every_weight = tl.sum(tl.load(weights + every, same & (every < count), 0.0), 1)
        for done in range(0, rows_of_expert(pairs, count, BLOCK_M), BLOCK_M):
            rows, taken = next_rows(pairs, count, done, BLOCK_M)
            value = product_with_weight(
                inner, rows, count, down_proj, scales, scales_2, expert, 0, INNER, first, 1,
                INNER, HIDDEN, BLOCK, BY_INPUT, WORDS, ASSEMBLY, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
            weight = tl.sum(tl.where(taken, every_weight[None, :], 0.0), 1)
            to = parts + rows[:, None] * HIDDEN + n[None, :]
            tl.store(to, value * weight[:, None], (rows < count)[:, None] & right[None, :])


def moe_route_launches(*operands: Any) -> Launches:
    """Return the launch of moe_route.

    logits: may be the partial sums [splits, B, T, X] of a product.
    """
    return route_launches(bind(moe_route, operands))


def root_route_launches(*operands: Any) -> Launches:
    """Return the launch of root_route with a bias; logits: as `moe_route_launches` has them."""
    known = bind(root_route, operands)
    one = {"groups": 1, "kept_groups": 1, "normalise": True, "always": 0}
    return route_launches(known | one, roots=True)


def route_launches(known: dict[str, Any], *, roots: bool = False) -> Launches:
    """Return the launch of `moe_route`, with its operands by name, or with other scores."""
    logits, chosen = known["logits"], known["experts"]
    parts = 1
    if logits.dim() == 4:
        parts, known["logits"] = logits.shape[0], logits[0]
    *axes, X = known["logits"].shape
    results = empty_results(moe_route, known)
    known |= {"logits": logits, "tokens": prod(axes), "PARTS": parts, "EXPERTS": X}
    known |= {"GROUP_ROWS": round_up_to_tile(known["groups"], 1)}
    known |= {"GROUP_ROW": round_up_to_tile(X // known["groups"], 2)}
    known |= {
        "ROOTS": roots,
        "CHOSEN": chosen,
        "WIDE": round_up_to_tile(chosen + known["always"], 2),
    }
    launch = Launch.by_name(route, (prod(axes),), known, results, warps=1)
    return Launches((launch,), results)


def moe_launches(*operands: Any) -> Launches:
    """Return the launches of moe and the sum of their result [N, k, E] over k.

    The rounding of a token's sums does not depend on the number of tokens, which may be a symbol if
    the op's `most` bounds it. Raises NotImplementedError for more than `MAX_TOKENS` tokens.
    """
    known = bind(moe, operands)
    x = known["x"]
    N, k = known["ids"].shape
    max_tokens = known["most"] or N
    if max_tokens > MAX_TOKENS:
        raise NotImplementedError(f"moe takes up to {MAX_TOKENS} tokens, not {max_tokens}")
    count, E, width = N * k, x.shape[1], known["gate_up_proj"].shape[2] // 2
    known |= {
        "count": count,
        "CHOSEN": k,
        "WIDE": round_up_to_tile(k, 2),
        "TOKENS": round_up_to_tile(max_tokens, 2),
    }
    known |= {"HIDDEN": E, "INNER": width, "ROW": round_up_to_tile(width)}

    def with_weight(name: str) -> dict[str, Any]:
        scales = {part: known[f"{name}_{part}"] for part in ("scales", "scales_2")}
        return known | scales | choose_tiles(x, known[f"{name}_proj"], **scales)

    first, second = with_weight("gate_up"), with_weight("down")
    grid = count, cdiv(2 * width, first["BLOCK_N"])
    splits = count_splits(k * grid[1], E, first)  # counts the programs of a single token
    sums = x.new_empty(splits, count, 2 * width, dtype=torch.float32)
    inner = x.new_empty(count, width)
    parts = known["weights"].new_empty(N, k, E)
    second |= {"sums": sums, "SPLITS": splits}
    products = Launch.by_name(gate_and_up, (*grid, splits), first, (sums,))
    grid = count, cdiv(E, second["BLOCK_N"])
    outputs = Launch.by_name(down, grid, second, (inner, parts))
    return Launches((products, outputs), parts, axis=1, dtype=x.dtype)


moe_route_triton = run_launches(moe_route, moe_route_launches)
root_route_by_kernel = run_launches(root_route, root_route_launches)
moe_triton = run_launches(moe, moe_launches)


def root_route_triton(*operands: Any) -> Any:
    """Run root_route on a GPU: by the kernel, or by PyTorch's operators if the tokens choose."""
    function = root_route._init_fn if operands[1] is None else root_route_by_kernel
    return function(*operands)
