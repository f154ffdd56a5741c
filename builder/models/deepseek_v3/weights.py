"""The table from checkpoint tensors to the program's weights: name, sources, pure transform."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpbuild.builder.models.common.layers import DENSE_EXPERTS
from mtpbuild.builder.models.common.share import WHOLE, Share
from mtpbuild.builder.models.deepseek_v3.config import ModelConfig

Transform = Callable[..., Tensor]


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint and the shape that the configuration demands."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None  # that ranks split; None: each holds all of it


@dataclass(frozen=True)
class Weight:
    """One parameter of the program (named as `DeepseekV3.state_dict` does) and how it is made."""

    name: str
    sources: tuple[Source, ...]
    transform: Transform
    rows: Transform | None = None  # of a product: as transform, but [out, ..], also for blocks
    slices: int = 1  # of what is stacked along a first axis
    joined: int | None = None  # of products: the sources' axis along which they are one

    @property
    def groups(self) -> Iterator[tuple[Source, ...]]:
        """The sources of each slice; their transform is [1, ..] of the whole."""
        size = len(self.sources) // self.slices
        return (self.sources[i : i + size] for i in range(0, len(self.sources), size))


def weight_table(c: ModelConfig, share: Share = WHOLE) -> list[Weight]:
    """Every weight of main model and MTP modules, in the order of use.

    Of a rank's share: its sources keep the checkpoint's shapes, transforms take them cut.
    """
    return list(_table(c, share))


def duplicates(c: ModelConfig) -> dict[str, str]:
    """Checkpoint names of MTP layers that repeat the embedding or the head -> the original."""
    head = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
    names = {"lm_head.weight": head} if c.tie_word_embeddings else {}
    for j in range(c.num_nextn_predict_layers):
        layer = f"model.layers.{c.num_hidden_layers + j}"
        names[f"{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        names[f"{layer}.shared_head.head.weight"] = head
    return names


def _table(c: ModelConfig, s: Share) -> Iterator[Weight]:
    E, V, L = c.hidden_size, c.vocab_size, c.num_hidden_layers
    embedding = Source("model.embed_tokens.weight", (V, E), axis=0)
    yield Weight("embed_tokens", (embedding,), keep)
    for i in range(L):
        yield from _layer(c, s, i, f"layers.{i}")
    yield _vector("norm.weight", "model.norm.weight", E)
    for j in range(c.num_nextn_predict_layers):
        yield from _mtp(c, s, L + j, f"mtp.{j}")
    head = embedding if c.tie_word_embeddings else Source("lm_head.weight", (V, E), axis=0)
    yield _product("lm_head", (head,), keep)


def _layer(c: ModelConfig, s: Share, index: int, to: str) -> Iterator[Weight]:
    at, E = f"model.layers.{index}", c.hidden_size
    yield _vector(f"{to}.input_layernorm.weight", f"{at}.input_layernorm.weight", E)
    yield from _attention(c, s, f"{at}.self_attn", f"{to}.self_attn")
    norm = "post_attention_layernorm.weight"
    yield _vector(f"{to}.{norm}", f"{at}.{norm}", E)
    if not c.is_moe(index):
        yield from _mlp(E, c.intermediate_size, f"{at}.mlp", f"{to}.mlp")
    elif c.n_routed_experts <= DENSE_EXPERTS:
        yield from _dense_moe(c, s, f"{at}.mlp", f"{to}.mlp")
    else:
        yield from _gathered_moe(c, s, f"{at}.mlp", f"{to}.mlp")


def _attention(c: ModelConfig, s: Share, at: str, to: str) -> Iterator[Weight]:
    E, H, r = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    n, R, v = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    own = H // s.parts
    kv_a = Source(f"{at}.kv_a_proj_with_mqa.weight", (r + R, E))

    def by_part(q: Tensor) -> Tensor:
        """Rows per head (nope, pe) -> all heads' nope, then all heads' pe."""
        heads = q.unflatten(0, (own, n + R))
        return torch.cat([heads[:, :n].flatten(0, 1), heads[:, n:].flatten(0, 1)])

    if c.q_lora_rank is None:
        q = Source(f"{at}.q_proj.weight", (H * (n + R), E), axis=0)
        yield _product(f"{to}.qkv_a_proj", (q, kv_a), lambda q, kv: torch.cat([by_part(q), kv]))
    else:
        q_a = Source(f"{at}.q_a_proj.weight", (c.q_lora_rank, E))
        yield _product(f"{to}.qkv_a_proj", (q_a, kv_a), stack_rows)
        norm = "q_a_layernorm.weight"
        yield _vector(f"{to}.{norm}", f"{at}.{norm}", c.q_lora_rank)
        q_b = Source(f"{at}.q_b_proj.weight", (H * (n + R), c.q_lora_rank), axis=0)
        yield _product(f"{to}.q_b_proj", (q_b,), by_part)
    yield _vector(f"{to}.kv_a_layernorm.weight", f"{at}.kv_a_layernorm.weight", r)
    kv_b = Source(f"{at}.kv_b_proj.weight", (H * (n + v), r), axis=0)
    yield Weight(f"{to}.w_uk", (kv_b,), lambda w: w.unflatten(0, (own, n + v))[:, :n])
    yield Weight(f"{to}.w_uv", (kv_b,), lambda w: w.unflatten(0, (own, n + v))[:, n:].mT)
    yield _product(f"{to}.o_proj", (Source(f"{at}.o_proj.weight", (E, H * v), axis=1),), keep)


def _mlp(hidden: int, inner: int, at: str, to: str) -> Iterator[Weight]:
    gate, up, down = (_projection(at, p, hidden, inner) for p in ("gate", "up", "down"))
    yield _product(f"{to}.gate_up_proj", (gate, up), stack_rows)
    yield _product(f"{to}.down_proj", (down,), keep)


def _gate(c: ModelConfig, at: str, to: str) -> Iterator[Weight]:
    gate = Source(f"{at}.gate.weight", (c.n_routed_experts, c.hidden_size))
    yield Weight(f"{to}.gate.weight", (gate,), transpose)
    bias = "gate.e_score_correction_bias"
    yield _vector(f"{to}.{bias}", f"{at}.{bias}", c.n_routed_experts)


def _experts(c: ModelConfig, s: Share, at: str, proj: str) -> tuple[Source, ...]:
    E, inner = c.hidden_size, c.moe_intermediate_size
    return tuple(_projection(f"{at}.experts.{e}", proj, E, inner) for e in s.experts(c))


def _shared(c: ModelConfig, s: Share, at: str, proj: str) -> tuple[Source, ...]:
    if not c.n_shared_experts or s.attention_dp:  # then they are apart, and whole
        return ()
    inner = c.moe_intermediate_size * c.n_shared_experts
    return (_projection(f"{at}.shared_experts", proj, c.hidden_size, inner),)


def _projection(at: str, proj: str, hidden: int, inner: int) -> Source:
    """Ranks split an MLP's inner columns."""
    shape = (hidden, inner) if proj == "down" else (inner, hidden)
    return Source(f"{at}.{proj}_proj.weight", shape, axis=int(proj == "down"))


def _dense_moe(c: ModelConfig, s: Share, at: str, to: str) -> Iterator[Weight]:
    yield from _gate(c, at, to)
    gate, up, down = (_experts(c, s, at, p) + _shared(c, s, at, p) for p in ("gate", "up", "down"))
    yield _product(f"{to}.experts.gate_up_proj", gate + up, stack_rows)
    yield _product(f"{to}.experts.down_proj", down, lambda *w: torch.cat(w, dim=1), joined=1)
    if s.attention_dp:
        yield from _shared_mlp(c, at, to)


def _gathered_moe(c: ModelConfig, s: Share, at: str, to: str) -> Iterator[Weight]:
    yield from _gate(c, at, to)
    gate, up, down = (_experts(c, s, at, p) for p in ("gate", "up", "down"))
    pairs = tuple(source for pair in zip(gate, up, strict=True) for source in pair)

    def gate_up(*w: Tensor) -> Tensor:
        return torch.stack([torch.cat(pair).T for pair in zip(w[::2], w[1::2], strict=True)])

    def downs(*w: Tensor) -> Tensor:
        return torch.stack([x.T for x in w])

    yield Weight(f"{to}.gate_up_proj", pairs, gate_up, slices=len(gate), joined=0)
    yield Weight(f"{to}.down_proj", down, downs, slices=len(down), joined=0)
    yield from _shared_mlp(c, at, to)


def _shared_mlp(c: ModelConfig, at: str, to: str) -> Iterator[Weight]:
    if c.n_shared_experts:
        inner = c.moe_intermediate_size * c.n_shared_experts
        shared = f"{at}.shared_experts"
        yield from _mlp(c.hidden_size, inner, shared, f"{to}.shared_experts")


def _mtp(c: ModelConfig, s: Share, index: int, to: str) -> Iterator[Weight]:
    at, E = f"model.layers.{index}", c.hidden_size
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield _vector(f"{to}.{norm}.weight", f"{at}.{norm}.weight", E)
    eh_proj = Source(f"{at}.eh_proj.weight", (E, 2 * E), axis=1)
    yield _product(f"{to}.eh_proj", (eh_proj,), keep)
    yield from _layer(c, s, index, to)


def _product(to: str, sources: tuple[Source, ...], rows: Transform, joined: int = 0) -> Weight:
    """Checkpoint [out, in] -> program [in, out]: the graph is `x @ w` without a Transpose."""
    return Weight(to, sources, lambda *w: rows(*w).T, rows, joined=joined)


def _vector(to: str, name: str, size: int) -> Weight:
    return Weight(to, (Source(name, (size,)),), keep)


def keep(w: Tensor) -> Tensor:
    return w


def transpose(w: Tensor) -> Tensor:
    return w.T


def stack_rows(*w: Tensor) -> Tensor:
    """Projections of one input become one product: [out_i, ..] each -> [sum of out_i, ..]."""
    return torch.cat(w)
