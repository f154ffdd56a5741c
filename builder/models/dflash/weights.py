"""The weights of a DFlash or DSpark head, by the names that `rename_dflash_tensor` gives them."""

from collections.abc import Iterator

from mtpbuild.builder.checkpoint.config import HEAD
from mtpbuild.builder.models.common.grouped_weights import list_grouped_weights
from mtpbuild.builder.models.common.weight import (
    StoredTensor,
    Weight,
    list_markov_weights,
    mlp,
    product,
    vector,
)
from mtpbuild.builder.models.dflash.config import DFlashConfig

AT, TO = HEAD, "mtp.0"
# Copies of the trunk's, which were not trained; confidences, which no step reads.
LEFT_OUT = ("embed_tokens.", "lm_head.", "confidence_head.")


def rename_dflash_tensor(name: str) -> str | None:
    """Return a tensor's name in the model; None for one that is not read."""
    bare = name.removeprefix("model.")
    return None if bare.startswith(LEFT_OUT) else f"{AT}.{bare}"


def list_dflash_weights(c: DFlashConfig) -> Iterator[Weight]:
    """Yield the rows of a weight table."""
    h = c.hidden_size
    yield product(f"{TO}.fc", StoredTensor(f"{AT}.fc.weight", (h, len(c.taps) * h)))
    yield vector(TO, AT, "hidden_norm.weight", h)
    for i in range(c.num_hidden_layers):
        at, to = f"{AT}.layers.{i}", f"{TO}.layers.{i}"
        yield vector(to, at, "input_layernorm.weight", h)
        yield from list_grouped_weights(c, i, at, to)
        yield vector(to, at, "post_attention_layernorm.weight", h)
        yield from mlp(h, c.intermediate_size, f"{at}.mlp", f"{to}.mlp")
    yield vector(TO, AT, "norm.weight", h)
    if c.markov_rank:
        yield from list_markov_weights(f"{AT}.markov_head", TO, c.vocab_size, c.markov_rank)
