"""delta_rule in Triton: token by token for a step's windows, 16 tokens at a time for prompts.

A program computes some columns of one head's state; columns do not depend on each other.
"""

from typing import Any

import triton
import triton.language as tl

from mtpbuild.plugins.definition import bind, empty_results
from mtpbuild.plugins.delta_rule.op import EPSILON, delta_advance, delta_rule
from mtpbuild.plugins.launch import Launch, Launches, cdiv, run_launches, tile

CHUNK = 16  # tokens that are multiplied together
DEEP = 32  # rows of a state that are read at a time
COLUMNS = 32  # of a state, per program


@triton.jit
def delta_of_tokens(
    mixed, ba, rate, bias, state, n,
    tokens,
    o, after,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr, EPSILON: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Program (b, h, j) runs the first n [B] tokens, or all, on column block j of head h's state.

    It keeps these columns in registers.
    """
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, v = tl.arange(0, WIDE), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    there = (k < KEYS)[:, None] & (v < VALUES)[None, :]
    place = (b * HEADS + h) * KEYS * VALUES + k[:, None] * VALUES + v[None, :]
    own_state = tl.load(state + place, there, 0.0)
    count = tokens
    if n is not None:
        count = tl.minimum(tl.load(n + b).to(tl.int32), tokens)
    for t in range(count):
        row = mixed + (b * tokens + t) * (2 * GROUPS * KEYS + HEADS * VALUES)
        of_group = row + h // (HEADS // GROUPS) * KEYS
        query = tl.load(of_group + k, k < KEYS, 0.0)
        query *= SCALE * tl.rsqrt(tl.sum(query * query, 0) + EPSILON)
        key = tl.load(of_group + GROUPS * KEYS + k, k < KEYS, 0.0)
        key *= tl.rsqrt(tl.sum(key * key, 0) + EPSILON)
        value = tl.load(row + 2 * GROUPS * KEYS + h * VALUES + v, v < VALUES, 0.0)
        at = ba + (b * tokens + t) * (2 * HEADS) + h
        own_state *= tl.exp(-tl.load(rate + h) * softplus(tl.load(at + HEADS) + tl.load(bias + h)))
        error = tl.sigmoid(tl.load(at)) * (value - tl.sum(own_state * key[:, None], 0))
        own_state += key[:, None] * error[None, :]
        to = o + ((b * tokens + t) * HEADS + h) * VALUES + v
        tl.store(to, tl.sum(own_state * query[:, None], 0), v < VALUES)
    tl.store(after + place, own_state, there)


@triton.jit
def delta_of_chunks(
    mixed, ba, rate, bias, state,
    tokens,
    o, after,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    COLUMNS: tl.constexpr, EPSILON: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr,
    DEEP: tl.constexpr,
):  # fmt: skip
    """Program (b, h, j) does the same for all tokens, by products over CHUNK tokens.

    Within a chunk token i changes the state by k_i u_i^T, where u_i follows from the state S before
    the chunk and from the chunk's tokens j < i: (1 + L) u = beta (v - exp(g) S^T k). Here g sums
    the logarithms of decays, and L_ij = beta_i exp(g_i - g_j) k_i k_j. The state is kept in `after`
    and is read and written DEEP rows at a time, because the state and its keys do not fit into
    registers.
    """
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    right = (v < VALUES)[None, :]
    i, deep = tl.arange(0, CHUNK), tl.arange(0, DEEP)
    lower, same = i[:, None] >= i[None, :], i[:, None] == i[None, :]
    first = (b * HEADS + h) * KEYS * VALUES + v[None, :]
    for begin in range(0, KEYS, DEEP):
        k = begin + deep[:, None]
        there = (k < KEYS) & right
        tl.store(after + first + k * VALUES, tl.load(state + first + k * VALUES, there), there)
    for chunk in range(0, tokens, CHUNK):
        tl.debug_barrier()  # threads read what other threads have written
        t = chunk + i
        real = t < tokens
        row = mixed + (b * tokens + t)[:, None] * (2 * GROUPS * KEYS + HEADS * VALUES)
        of_group = row + h // (HEADS // GROUPS) * KEYS
        alike, scores = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
        by_key = tl.zeros((CHUNK, COLUMNS), tl.float32)
        by_query = tl.zeros((CHUNK, COLUMNS), tl.float32)
        of_keys, of_queries = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
        for begin in range(0, KEYS, DEEP):
            k = begin + deep
            inside = real[:, None] & (k < KEYS)[None, :]
            query = tl.load(of_group + k[None, :], inside, 0.0)
            key = tl.load(of_group + GROUPS * KEYS + k[None, :], inside, 0.0)
            there = (k < KEYS)[:, None] & right
            own_state = tl.load(after + first + k[:, None] * VALUES, there, 0.0)
            alike = tl.dot(key, tl.trans(key), alike, input_precision="tf32x3")
            scores = tl.dot(query, tl.trans(key), scores, input_precision="tf32x3")
            by_key = tl.dot(key, own_state, by_key, input_precision="tf32x3")
            by_query = tl.dot(query, own_state, by_query, input_precision="tf32x3")
            of_keys += tl.sum(key * key, 1)
            of_queries += tl.sum(query * query, 1)
        of_keys = tl.rsqrt(of_keys + EPSILON)
        of_queries = SCALE * tl.rsqrt(of_queries + EPSILON)
        inside = real[:, None] & right
        value = tl.load(row + 2 * GROUPS * KEYS + h * VALUES + v[None, :], inside, 0.0)
        at = ba + (b * tokens + t) * (2 * HEADS) + h
        a = tl.load(at + HEADS, real, 0.0) + tl.load(bias + h)
        decay = tl.where(real, -tl.load(rate + h) * softplus(a), 0.0)
        beta = tl.where(real, tl.sigmoid(tl.load(at, real, 0.0)), 0.0)[:, None]
        sums, total = tl.sum(tl.where(lower, decay[None, :], 0.0), 1), tl.sum(decay, 0)
        apart = tl.exp(tl.where(lower, sums[:, None] - sums[None, :], 0.0)) * of_keys[None, :]
        less = tl.where(lower & ~same, -beta * apart * alike * of_keys[:, None], 0.0)
        solved = inverse_without(less, CHUNK)
        since = tl.exp(sums)[:, None]
        error = beta * (value - since * of_keys[:, None] * by_key)
        change = tl.dot(solved, error, input_precision="tf32x3")
        scores = tl.where(lower, apart * scores * of_queries[:, None], 0.0)
        found = since * of_queries[:, None] * by_query
        found += tl.dot(scores, change, input_precision="tf32x3")
        to = o + ((b * tokens + t) * HEADS + h)[:, None] * VALUES + v[None, :]
        tl.store(to, found, inside)
        kept = (of_keys * tl.exp(total - sums))[:, None]
        tl.debug_barrier()
        for begin in range(0, KEYS, DEEP):
            k = begin + deep
            inside = real[:, None] & (k < KEYS)[None, :]
            key = kept * tl.load(of_group + GROUPS * KEYS + k[None, :], inside, 0.0)
            there, place = (k < KEYS)[:, None] & right, after + first + k[:, None] * VALUES
            own_state = tl.exp(total) * tl.load(place, there, 0.0)
            own_state += tl.dot(tl.trans(key), change, input_precision="tf32x3")
            tl.store(place, own_state, there)


@triton.jit
def inverse_without(less, CHUNK: tl.constexpr):
    """Return the inverse of 1 - less, where `less` [CHUNK, CHUNK] is strictly lower triangular."""
    i = tl.arange(0, CHUNK)
    for r in range(1, CHUNK):  # row by row, without the diagonal
        own = tl.sum(tl.where(i[:, None] == r, less, 0.0), 0)
        own += tl.sum(own[:, None] * less, 0)
        less = tl.where(i[:, None] == r, own[None, :], less)
    return less + tl.where(i[:, None] == i[None, :], 1.0, 0.0)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


def launch_of(kernel: Any, known: dict[str, Any], **others: Any) -> Launch:
    """Return a launch of one of the kernels; known: an op's operands by name."""
    mixed, state = known["mixed"], known["state"]
    B, H, K, V = state.shape
    groups = (mixed.shape[-1] - H * V) // (2 * K)
    constants = {"HEADS": H, "GROUPS": groups, "KEYS": K, "VALUES": V, "WIDE": tile(K)}
    constants |= {"COLUMNS": COLUMNS, "EPSILON": EPSILON, "SCALE": K**-0.5}
    given = known | constants | others | {"tokens": mixed.shape[1]}
    return Launch.by_name(kernel, (B, H, cdiv(V, COLUMNS)), given, empty_results(delta_rule, known))


def delta_rule_launches(*operands: Any) -> Launches:
    """Return the launch of delta_rule; a symbolic number of tokens means a prompt."""
    known = bind(delta_rule, operands)
    tokens = known["mixed"].shape[1]
    if isinstance(tokens, int) and tokens <= CHUNK:
        launch = launch_of(delta_of_tokens, known, n=None)
    else:
        launch = launch_of(delta_of_chunks, known, CHUNK=CHUNK, DEEP=DEEP)
    return Launches((launch,), launch.outputs)


def delta_advance_launches(*operands: Any) -> Launches:
    """Return the launch of delta_advance, of whose outputs only the state is used."""
    launch = launch_of(delta_of_tokens, bind(delta_advance, operands))
    return Launches((launch,), launch.outputs[1])


OPERANDS = ("mixed", "ba", "rate", "bias", "state")
delta_rule_triton = run_launches(delta_rule, delta_rule_launches, *OPERANDS)
delta_advance_triton = run_launches(delta_advance, delta_advance_launches, *OPERANDS, "n")
