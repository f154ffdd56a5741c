"""DeepSeek-V3's table from checkpoint tensors to the program's weights."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from mtpbuild.builder.models.common.weights import (
    Share,
    Source,
    Weight,
    embedding,
    mlp,
    moe,
    product,
    vector,
)
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config


def weight_table(c: DeepseekV3Config, share: Share) -> list[Weight]:
    """Every weight of main model and MTP modules, in the order of use.

    Sources keep the checkpoint's shapes; transforms take them cut to the share.
    """
    shape, L = (c.vocab_size, c.hidden_size), c.num_hidden_layers
    tokens = Source("model.embed_tokens.weight", shape, axis=0)
    head = tokens if c.tie_word_embeddings else Source("lm_head.weight", shape, axis=0)
    layers = (_layer(c, share, i, f"layers.{i}") for i in range(L))
    modules = (_mtp(c, share, L + j, f"mtp.{j}") for j in range(c.num_nextn_predict_layers))
    return [
        embedding("embed_tokens", tokens),
        *chain.from_iterable(layers),
        vector("norm", "model.norm", "weight", c.hidden_size),
        *chain.from_iterable(modules),
        product("lm_head", head),
    ]


def _layer(c: DeepseekV3Config, s: Share, index: int, to: str) -> Iterator[Weight]:
    at, E = f"model.layers.{index}", c.hidden_size
    yield vector(to, at, "input_layernorm.weight", E)
    yield from _attention(c, s, f"{at}.self_attn", f"{to}.self_attn")
    yield vector(to, at, "post_attention_layernorm.weight", E)
    if c.is_moe(index):
        yield from moe(c, s, f"{at}.mlp", f"{to}.mlp")
    else:
        yield from mlp(E, c.intermediate_size, f"{at}.mlp", f"{to}.mlp")


def _attention(c: DeepseekV3Config, s: Share, at: str, to: str) -> Iterator[Weight]:
    E, H, r = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    n, R, v = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    own = H // s.ranks.parts
    kv_a = Source(f"{at}.kv_a_proj_with_mqa.weight", (r + R, E))

    def by_part(q: Tensor, *others: Tensor) -> Tensor:
        """Rows per head (nope, pe) -> all heads' nope, then all heads' pe, then the others."""
        heads = q.unflatten(0, (own, n + R))
        return torch.cat([heads[:, :n].flatten(0, 1), heads[:, n:].flatten(0, 1), *others])

    if c.q_lora_rank is None:
        q = Source(f"{at}.q_proj.weight", (H * (n + R), E), axis=0)
        yield product(f"{to}.qkv_a_proj", q, kv_a, rows=by_part)
    else:
        q_a = Source(f"{at}.q_a_proj.weight", (c.q_lora_rank, E))
        yield product(f"{to}.qkv_a_proj", q_a, kv_a)
        yield vector(to, at, "q_a_layernorm.weight", c.q_lora_rank)
        q_b = Source(f"{at}.q_b_proj.weight", (H * (n + R), c.q_lora_rank), axis=0)
        yield product(f"{to}.q_b_proj", q_b, rows=by_part)
    yield vector(to, at, "kv_a_layernorm.weight", r)
    kv_b = Source(f"{at}.kv_b_proj.weight", (H * (n + v), r), axis=0)
    yield Weight(f"{to}.w_uk", (kv_b,), lambda w: w.unflatten(0, (own, n + v))[:, :n])
    yield Weight(f"{to}.w_uv", (kv_b,), lambda w: w.unflatten(0, (own, n + v))[:, n:].mT)
    yield product(f"{to}.o_proj", Source(f"{at}.o_proj.weight", (E, H * v), axis=1))


def _mtp(c: DeepseekV3Config, s: Share, index: int, to: str) -> Iterator[Weight]:
    at, E = f"model.layers.{index}", c.hidden_size
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield vector(to, at, f"{norm}.weight", E)
    yield product(f"{to}.eh_proj", Source(f"{at}.eh_proj.weight", (E, 2 * E), axis=1))
    yield from _layer(c, s, index, to)
