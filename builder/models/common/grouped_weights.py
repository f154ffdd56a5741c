"""The weights of grouped-query attention."""

from collections.abc import Iterator

from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.weights.made import Stored, Weight, product, stack_rows, vector


def grouped_weights(c: GroupedConfig, at: str, to: str) -> Iterator[Weight]:
    """Yields the weights of one attention, from the names that Llama-like checkpoints use."""
    E, D = c.hidden_size, c.head_dim
    counts = {"q": c.num_attention_heads, "k": c.num_key_value_heads, "v": c.num_key_value_heads}
    sizes = {f"{at}.{name}_proj": count * D for name, count in counts.items()}
    weights = (Stored(f"{name}.weight", (size, E), axis=0) for name, size in sizes.items())
    yield product(f"{to}.qkv_proj", *weights)
    if c.attention_bias:
        biases = tuple(Stored(f"{name}.bias", (size,), axis=0) for name, size in sizes.items())
        yield Weight(f"{to}.qkv_bias", biases, stack_rows)
    if c.use_qk_norm:
        yield vector(to, at, "q_norm.weight", D)
        yield vector(to, at, "k_norm.weight", D)
    rows = c.num_attention_heads * D
    yield product(f"{to}.o_proj", Stored(f"{at}.o_proj.weight", (E, rows), axis=1))
