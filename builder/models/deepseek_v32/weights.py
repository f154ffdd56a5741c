"""DeepSeek-V3.2's table of weights: DeepSeek-V3's, and the indexers."""

from collections.abc import Iterator

from mtpbuild.builder.models.common.moe_weights import make_moe_table
from mtpbuild.builder.models.common.weight import Share, Stored, Weight, product, vector
from mtpbuild.builder.models.deepseek_v3.weights import attention
from mtpbuild.builder.models.deepseek_v32.config import DeepseekV32Config


def weight_table(c: DeepseekV32Config, share: Share) -> list[Weight]:
    """Return every weight of main model and MTP modules, in the order of use."""

    def list_sparse_attention_weights(at: str, to: str) -> Iterator[Weight]:
        yield from attention(c, share, at, to)
        if c.has_indexer(int(at.split(".")[2])):  # model.layers.N.self_attn
            yield from indexer(c, f"{at}.indexer", f"{to}.indexer")

    return make_moe_table(c, share, list_sparse_attention_weights)


def indexer(c: DeepseekV32Config, at: str, to: str) -> Iterator[Weight]:
    assert c.q_lora_rank is not None
    E, H, D = c.hidden_size, c.index_n_heads, c.index_head_dim
    yield product(f"{to}.wq_b", Stored(f"{at}.wq_b.weight", (H * D, c.q_lora_rank)))
    yield product(f"{to}.wk", Stored(f"{at}.wk.weight", (D, E)))
    yield vector(to, at, "k_norm.weight", D)
    yield vector(to, at, "k_norm.bias", D)
    yield product(f"{to}.weights_proj", Stored(f"{at}.weights_proj.weight", (H, E)))
