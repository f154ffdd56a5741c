"""Gemma-4's table from checkpoint tensors to the program's weights."""

from collections.abc import Iterator
from itertools import chain

from mtpbuild.builder.models.common.moe_weights import list_projections, stack_experts
from mtpbuild.builder.models.common.weight import (
    Share,
    StoredTensor,
    Weight,
    add_ends,
    embedding,
    mlp,
    product,
    vector,
)
from mtpbuild.builder.models.gemma4.config import LAYER_TABLE, Gemma4Config

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def weight_table(c: Gemma4Config, share: Share) -> list[Weight]:
    """Return every weight, in the order of use."""
    layers = (
        list_layer_weights(c, i, f"model.layers.{i}", f"layers.{i}")
        for i in range(c.num_hidden_layers)
    )
    norm = vector("norm", "model.norm", "weight", c.hidden_size)
    return add_ends(c, [*list_input_weights(c), *chain.from_iterable(layers), norm])


def list_input_weights(c: Gemma4Config) -> Iterator[Weight]:
    """Yield what makes the inputs that layers have of their own."""
    if not (P := c.hidden_size_per_layer_input):
        return
    values = P * c.num_hidden_layers
    to = "layer_inputs"
    table = StoredTensor(LAYER_TABLE, (c.vocab_size_per_layer_input, values))
    yield embedding(f"{to}.table", table)
    name = "model.per_layer_model_projection.weight"
    yield product(f"{to}.projection", StoredTensor(name, (values, c.hidden_size)))
    yield vector(f"{to}.norm", "model.per_layer_projection_norm", "weight", P)


def list_layer_weights(c: Gemma4Config, index: int, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights of a layer."""
    E = c.hidden_size
    for norm in NORMS:
        yield vector(to, at, f"{norm}.weight", E)
    yield from list_attention_weights(c, index, f"{at}.self_attn", f"{to}.self_attn")
    yield from mlp(E, c.inner(index), f"{at}.mlp", f"{to}.mlp")
    if c.n_routed_experts:
        yield from list_expert_weights(c, at, f"{to}.experts")
    if P := c.hidden_size_per_layer_input:
        place = f"{to}.layer_input"
        yield product(f"{place}.gate", StoredTensor(f"{at}.per_layer_input_gate.weight", (P, E)))
        stored = StoredTensor(f"{at}.per_layer_projection.weight", (E, P))
        yield product(f"{place}.projection", stored)
        yield vector(f"{place}.norm", f"{at}.post_per_layer_input_norm", "weight", E)
    yield vector(to, at, "layer_scalar", 1)


def list_attention_weights(c: Gemma4Config, index: int, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights of a layer's attention; one that reads others' rows has no keys."""
    E, D, heads = c.hidden_size, c.width(index), c.num_attention_heads
    counts = {"q": heads}
    if index < c.first_shared:
        counts["k"] = c.key_heads(index)
        if not c.shares_values(index):
            counts["v"] = c.key_heads(index)
    stored = (
        StoredTensor(f"{at}.{name}_proj.weight", (count * D, E)) for name, count in counts.items()
    )
    yield product(f"{to}.qkv_proj", *stored)
    for name in ("q", "k"):
        if name in counts:
            yield vector(to, at, f"{name}_norm.weight", D)
    yield product(f"{to}.o_proj", StoredTensor(f"{at}.o_proj.weight", (E, heads * D)))


def list_expert_weights(c: Gemma4Config, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights of a layer's router and experts."""
    E, X, inner = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size
    norms = {"dense_norm": "post_feedforward_layernorm_1"}
    norms["input_norm"] = "pre_feedforward_layernorm_2"
    norms["norm"] = "post_feedforward_layernorm_2"
    for ours, theirs in norms.items():
        yield vector(f"{to}.{ours}", f"{at}.{theirs}", "weight", E)
    scale = StoredTensor(f"{at}.router.scale", (E,))
    yield Weight(f"{to}.gate.norm.weight", (scale,), lambda w: w * E**-0.5)
    router = StoredTensor(f"{at}.router.proj.weight", (X, E))
    yield Weight(f"{to}.gate.weight", (router,), lambda w: w.T)
    scales = StoredTensor(f"{at}.router.per_expert_scale", (X,))
    yield Weight(f"{to}.gate.scales", (scales,))
    experts = list_projections(f"{at}.experts", range(X), E, inner)
    yield from stack_experts(to, experts)
