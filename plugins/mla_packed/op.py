"""mla_packed: `mla_queries`, `mla_attention` and `mla_values` in one op, with packed weights."""

from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.int8_rows import read_both
from mtpbuild.plugins.mla_attention.op import latent_layout, mla_attention
from mtpbuild.plugins.mla_heads.op import mla_queries, mla_values
from mtpbuild.plugins.product_packed.op import unpacked


@define(
    lambda q, w_uk, v_head_dim: q.new_empty(*q.shape[:2], w_uk.shape[0] * v_head_dim),
    Node("LatentAttention", {"kv_lora_rank": "latent", "v_head_dim": "N"}, latent_layout),
)
def mla_packed(
    q: Tensor,
    w_uk: Tensor,
    w_uk_scales: Tensor | None,
    w_uv: Tensor,
    w_uv_scales: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    fresh: Tensor,
    base: Tensor,
    first: Tensor,
    scale: float,
    kv_lora_rank: int,
    v_head_dim: int,
    interleaved: bool,
    chosen: Tensor | None = None,
) -> Tensor:
    """Compute the heads' values [B, T, H * v_head_dim] from queries q [B, T, H * (n + R)].

    w_uk has kv_lora_rank outputs of n inputs, w_uv v_head_dim outputs of kv_lora_rank inputs. Both
    are in the layout of `product_packed` with the heads first, fp32 or integers. The other operands
    are those of the three ops. With integers the kernels round the inputs of products to int8.
    """
    q = mla_queries(q, unpacked(w_uk, w_uk_scales, kv_lora_rank).mT, cos, sin, interleaved)
    cache, fresh = read_both(cache, fresh, [kv_lora_rank, q.shape[-1] - kv_lora_rank])
    o = mla_attention(q, cache, fresh, base, first, scale, kv_lora_rank, chosen)
    return mla_values(o, unpacked(w_uv, w_uv_scales, v_head_dim).mT)
