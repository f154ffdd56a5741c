"""The copies of embedding and head in a checkpoint's MTP layers; most equal the trunk's."""

from dataclasses import dataclass
from typing import TypeVar

from mtpbuild.builder.checkpoint.config import ModelConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Config = TypeVar("Config", bound=ModelConfig)


@dataclass(frozen=True)
class Copy:
    """A tensor that repeats `original`; if it differs, it is the module's own weight."""

    name: str
    original: str
    module: int | None = None  # from 0; None: a head that is tied to the embedding
    head: bool = False  # the module's head, not its embedding


def list_tied_head(c: ModelConfig) -> list[Copy]:
    """List the head if it is tied to the embedding; a checkpoint may store it all the same."""
    return [Copy(HEAD, EMBEDDING)] if c.tie_word_embeddings else []


def list_copies_in_layers(c: ModelConfig) -> list[Copy]:
    """List the copies that DeepSeek's and GLM's checkpoints may hold in their MTP layers."""
    if c.head:
        return list_tied_head(c)
    head = EMBEDDING if c.tie_word_embeddings else HEAD
    copies = list_tied_head(c)
    for j in range(c.num_nextn_predict_layers):
        layer = f"model.layers.{c.num_hidden_layers + j}"
        copies.append(Copy(f"{layer}.embed_tokens.weight", EMBEDDING, j))
        copies.append(Copy(f"{layer}.shared_head.head.weight", head, j, head=True))
    return copies


def is_own(c: ModelConfig, copy: Copy) -> bool:
    """Return whether the copy differs from the original, so that it is the module's own."""
    return copy.module in (c.own_heads if copy.head else c.own_embeddings)
