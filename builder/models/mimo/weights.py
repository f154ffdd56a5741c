"""MiMo-7B's table from checkpoint tensors to the program's weights."""

from collections.abc import Iterator

from mtpbuild.builder.models.common.grouped_weights import grouped_weights
from mtpbuild.builder.models.common.weight import (
    Share,
    Stored,
    Weight,
    list_layer_weights,
    make_whole_table,
    mlp,
    product,
)
from mtpbuild.builder.models.mimo.config import PREFIX, MimoConfig

NORMS = {  # the program's names -> the checkpoint's
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "shared_head.norm": "final_layernorm",
}


def weight_table(c: MimoConfig, share: Share) -> list[Weight]:
    """Return every weight of main model and MTP modules, in the order of use."""

    def layer(at: str, to: str) -> Iterator[Weight]:
        attention = grouped_weights(c, f"{at}.self_attn", f"{to}.self_attn")
        feed_forward = mlp(c.hidden_size, c.intermediate_size, f"{at}.mlp", f"{to}.mlp")
        return list_layer_weights(c, at, to, attention, feed_forward)

    def modules() -> Iterator[Weight]:
        E = c.hidden_size
        for j in range(c.num_nextn_predict_layers):
            at, to = f"{PREFIX}{j}", f"mtp.{j}"
            for ours, theirs in NORMS.items():
                yield Weight(f"{to}.{ours}.weight", (Stored(f"{at}.{theirs}.weight", (E,)),))
            yield product(f"{to}.eh_proj", Stored(f"{at}.input_proj.weight", (E, 2 * E), axis=1))
            yield from layer(at, to)

    return make_whole_table(c, lambda i, to: layer(f"model.layers.{i}", to), modules())
