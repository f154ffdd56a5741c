"""The weights of an EAGLE-3 head, by the names that `rename_tensor` gives them."""

from __future__ import annotations  # Tensor is imported for types alone

import re
from collections.abc import Iterator

from mtpbuild.builder.checkpoint.config import HEAD
from mtpbuild.builder.models.common.grouped_weights import list_grouped_weights
from mtpbuild.builder.models.common.weight import (
    StoredTensor,
    Weight,
    embedding,
    mlp,
    product,
    vector,
)
from mtpbuild.builder.models.eagle3.config import Eagle3Config

AT, TO = HEAD, "mtp.0"
LAYER = re.compile(r"(?:midlayer|(?:model\.)?layers\.0)\.(.+)")
NORMS = {
    "input_layernorm": "input_layernorm.embedding",
    "hidden_norm": "input_layernorm.hidden",
    "post_attention_layernorm": "post_attention_layernorm",
    "norm": "norm",
}
IDS = ("d2t", "t2d")  # no weights


def rename_tensor(name: str) -> str | None:
    """Return a tensor's name in the model; None for one that is not read."""
    if name.partition(".")[0] in IDS:
        return None
    match = LAYER.fullmatch(name)
    return f"{AT}.{match[1] if match else name.removeprefix('model.')}"


def list_eagle3_weights(c: Eagle3Config) -> Iterator[Weight]:
    """Yield the rows of a weight table."""
    h, taps = c.hidden_size, c.taps or ()
    if taps:
        inputs = len(taps) * c.target_hidden_size
        if c.norm_before_fc:
            yield vector(TO, AT, "input_norm.weight", inputs)
        for i in range(len(taps) if c.fc_norm else 0):
            yield vector(TO, AT, f"fc_norm.{i}.weight", c.target_hidden_size)
        yield product(f"{TO}.fc", StoredTensor(f"{AT}.fc.weight", (h, inputs)))
    for theirs, ours in NORMS.items():
        yield vector(f"{TO}.{ours}", f"{AT}.{theirs}", "weight", h)
    yield from list_grouped_weights(c, 0, AT, TO, inputs=2 * h)
    yield from mlp(h, c.intermediate_size, f"{AT}.mlp", f"{TO}.mlp")
    if c.embeds:
        yield embedding(
            f"{TO}.embed_tokens", StoredTensor(f"{AT}.embed_tokens.weight", (c.vocab_size, h))
        )
    if c.has_head:
        yield product(f"{TO}.lm_head", StoredTensor(f"{AT}.lm_head.weight", (c.drafted, h)))
