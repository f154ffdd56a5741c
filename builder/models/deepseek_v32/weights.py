"""DeepSeek-V3.2's table of weights: DeepSeek-V3's, and the indexers."""

from collections.abc import Iterator
from functools import partial

from mtpbuild.builder.models.common.moe_weights import list_feed_forward_weights
from mtpbuild.builder.models.common.weight import (
    Share,
    StoredTensor,
    Weight,
    make_weight_table,
    product,
    vector,
)
from mtpbuild.builder.models.deepseek_v3.weights import list_latent_weights
from mtpbuild.builder.models.deepseek_v32.config import DeepseekV32Config


def weight_table(c: DeepseekV32Config, share: Share) -> list[Weight]:
    """Return every weight of main model and MTP modules, in the order of use."""

    def attention(index: int, at: str, to: str) -> Iterator[Weight]:
        yield from list_latent_weights(c, share, index, at, to)
        if c.has_indexer(index):
            yield from indexer(c, f"{at}.self_attn.indexer", f"{to}.self_attn.indexer")

    return make_weight_table(c, attention, partial(list_feed_forward_weights, c, share))


def indexer(c: DeepseekV32Config, at: str, to: str) -> Iterator[Weight]:
    assert c.q_lora_rank is not None
    E, H, D = c.hidden_size, c.index_n_heads, c.index_head_dim
    yield product(f"{to}.wq_b", StoredTensor(f"{at}.wq_b.weight", (H * D, c.q_lora_rank)))
    yield product(f"{to}.wk", StoredTensor(f"{at}.wk.weight", (D, E)))
    yield vector(to, at, "k_norm.weight", D)
    yield vector(to, at, "k_norm.bias", D)
    yield product(f"{to}.weights_proj", StoredTensor(f"{at}.weights_proj.weight", (H, E)))
