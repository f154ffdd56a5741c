"""DeepSeek-V4's table from checkpoint tensors to the program's weights."""

from __future__ import annotations  # Tensor is imported for types alone

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from mtpbuild.builder.lazy_torch import torch
from mtpbuild.builder.models.common.copies import EMBEDDING, HEAD
from mtpbuild.builder.models.common.moe_weights import make_slice
from mtpbuild.builder.models.common.weight import (
    DRAFT_HEAD,
    Share,
    StoredTensor,
    Weight,
    embedding,
    list_markov_weights,
    mlp,
    pick_drafted_rows,
    product,
    projection,
    vector,
)
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config, DSparkConfig

if TYPE_CHECKING:
    from torch import Tensor


def weight_table(c: DeepseekV4Config, share: Share) -> list[Weight]:
    """Return every weight, in the order of use."""
    L, E = c.num_hidden_layers, c.hidden_size
    tokens = StoredTensor(EMBEDDING, (c.vocab_size, E))
    head = tokens if c.tie_word_embeddings else StoredTensor(HEAD, (c.vocab_size, E))
    layers = (list_layer_weights(c, i, f"model.layers.{i}", f"layers.{i}") for i in range(L))
    modules = (
        list_module_weights(c, j) for j in range(0 if c.head else c.num_nextn_predict_layers)
    )
    return [
        embedding("embed_tokens", tokens),
        *chain.from_iterable(layers),
        *list_stream_head(c, "model.hc_head.hc_", "hc_head"),
        vector("norm", "model.norm", "weight", E),
        *chain.from_iterable(modules),
        product("lm_head", head),
        *([product(DRAFT_HEAD, head, rows=pick_drafted_rows(c))] if c.draft_ids else []),
        *(Weight(name, (StoredTensor(name, shape),)) for name, shape in c.drafter_weights),
    ]


def list_layer_weights(c: DeepseekV4Config, index: int, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights of a layer."""
    E, N = c.hidden_size, c.hc_mult
    for mixer in ("attn_hc", "ffn_hc"):
        fn = StoredTensor(f"{at}.{mixer}.fn", (N * (N + 2), N * E))
        yield Weight(f"{to}.{mixer}.fn", (fn,), transpose)
        yield vector(f"{to}.{mixer}", f"{at}.{mixer}", "base", N * (N + 2))
        yield vector(f"{to}.{mixer}", f"{at}.{mixer}", "scale", 3)
    yield vector(to, at, "input_layernorm.weight", E)
    yield from list_attention_weights(c, index, f"{at}.self_attn", f"{to}.self_attn")
    yield vector(to, at, "post_attention_layernorm.weight", E)
    yield from list_expert_weights(c, index, f"{at}.mlp", f"{to}.mlp")


def list_attention_weights(c: DeepseekV4Config, index: int, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights of a layer's attention, with its compressor and its indexer."""
    E, H, D, q, rank = (
        c.hidden_size, c.num_attention_heads, c.head_dim, c.q_lora_rank, c.o_lora_rank,
    )  # fmt: skip
    q_a = StoredTensor(f"{at}.q_a_proj.weight", (q, E))
    yield product(f"{to}.qkv_a_proj", q_a, StoredTensor(f"{at}.kv_proj.weight", (D, E)))
    yield vector(to, at, "q_a_norm.weight", q)
    yield vector(to, at, "kv_norm.weight", D)
    yield product(f"{to}.q_b_proj", StoredTensor(f"{at}.q_b_proj.weight", (H * D, q)))
    yield vector(to, at, "sinks", H)
    if c.ratio(index):
        yield from list_compressor_weights(c, index, f"{at}.compressor", f"{to}.compressor")
    if c.chooses(index):
        indexer = f"{at}.compressor.indexer"
        heads = c.index_n_heads
        queries = StoredTensor(f"{indexer}.q_b_proj.weight", (heads * c.index_head_dim, q))
        yield product(f"{to}.indexer.q_b_proj", queries)
        weights = StoredTensor(f"{indexer}.scorer.weights_proj.weight", (heads, E))
        yield product(f"{to}.indexer.weights_proj", weights)
    groups = StoredTensor(f"{at}.o_a_proj.weight", (c.o_groups * rank, H * D // c.o_groups))
    yield product(f"{to}.o_a_proj", groups)
    yield product(f"{to}.o_b_proj", StoredTensor(f"{at}.o_b_proj.weight", (E, c.o_groups * rank)))


def list_compressor_weights(c: DeepseekV4Config, index: int, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights that make a layer's compressed rows, and its indexer's keys."""
    windows = 1 + c.chooses(index)
    widths = {at: windows * c.head_dim}
    if c.chooses(index):
        widths[f"{at}.indexer"] = windows * c.index_head_dim
    stored = [
        StoredTensor(f"{place}.{name}_proj.weight", (width, c.hidden_size))
        for name in ("kv", "gate")
        for place, width in widths.items()
    ]
    yield product(f"{to}.proj", *stored)
    biases = tuple(
        StoredTensor(f"{place}.position_bias", (c.ratio(index), width))
        for place, width in widths.items()
    )
    yield Weight(f"{to}.position_bias", biases, join_columns)
    for i, (place, width) in enumerate(widths.items()):
        norm = StoredTensor(f"{place}.kv_norm.weight", (width // windows,))
        yield Weight(f"{to}.norms.{i}.weight", (norm,))


def join_columns(*w: Tensor) -> Tensor:
    return torch.cat(w, 1)


def transpose(w: Tensor) -> Tensor:
    return w.T


def list_expert_weights(c: DeepseekV4Config, index: int, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights of a layer's router and experts."""
    E, X, inner = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size
    router = StoredTensor(f"{at}.gate.weight", (X, E))
    yield Weight(f"{to}.gate.weight", (router,), transpose)
    if c.is_hashed(index):
        table = StoredTensor(
            f"{at}.gate.tid2eid", (c.vocab_size, c.num_experts_per_tok), has_ids=True
        )
        yield Weight(f"{to}.gate.table", (table,))
    else:
        bias = StoredTensor(f"{at}.gate.e_score_correction_bias", (X,))
        yield Weight(f"{to}.gate.bias", (bias,))
    gates, ups, downs = (
        [projection(f"{at}.experts.{e}", name, E, inner) for e in range(X)]
        for name in ("gate", "up", "down")
    )
    pairs = tuple(chain.from_iterable(zip(gates, ups, strict=True)))
    yield Weight(f"{to}.gate_up_proj", pairs, make_slice, slices=X, concat_axis=0)
    yield Weight(f"{to}.down_proj", tuple(downs), make_slice, slices=X, concat_axis=0)
    shared = f"{at}.shared_experts"
    yield from mlp(E, inner * c.n_shared_experts, shared, f"{to}.shared_experts")


def list_stream_head(c: DeepseekV4Config, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights by which the streams are summed; `at` ends before their names."""
    N = c.hc_mult
    yield Weight(f"{to}.fn", (StoredTensor(f"{at}fn", (N, N * c.hidden_size)),), transpose)
    yield Weight(f"{to}.base", (StoredTensor(f"{at}base", (N,)),))
    yield Weight(f"{to}.scale", (StoredTensor(f"{at}scale", (1,)),))


def list_module_weights(c: DeepseekV4Config, j: int) -> Iterator[Weight]:
    """Yield the weights of an MTP module."""
    at, to, E = c.name_module(j), f"mtp.{j}", c.hidden_size
    for name in ("e", "h"):
        yield vector(f"{to}.{name}norm", f"{at}.{name}norm", "weight", E)
        yield product(f"{to}.{name}_proj", StoredTensor(f"{at}.{name}_proj.weight", (E, E)))
    yield from list_layer_weights(c, c.num_hidden_layers + j, at, f"{to}.layer")
    yield from list_stream_head(c, f"{at}.hc_head.hc_", f"{to}.hc_head")
    yield vector(f"{to}.norm", f"{at}.norm", "weight", E)


def list_dspark_weights(c: DSparkConfig) -> Iterator[Weight]:
    """Yield the weights of a DSpark head."""
    first, last, to, E = "mtp.0", f"mtp.{c.stages - 1}", "mtp.0", c.hidden_size
    stored = StoredTensor(f"{first}.main_proj.weight", (E, len(c.taps) * E))
    yield product(f"{to}.fc", stored)
    yield Weight(f"{to}.hidden_norm.weight", (StoredTensor(f"{first}.main_norm.weight", (E,)),))
    for i in range(c.stages):
        at = f"mtp.{i}"
        yield from list_layer_weights(c, c.num_hidden_layers + i, at, f"{to}.layers.{i}")
    yield from list_stream_head(c, f"{last}.hc_head.hc_", f"{to}.hc_head")
    yield vector(to, last, "norm.weight", E)
    yield from list_markov_weights(f"{last}.markov_head", to, c.vocab_size, c.markov_rank)
