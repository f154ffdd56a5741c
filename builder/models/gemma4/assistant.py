"""Gemma-4's assistant in the step program: layers that attend to the trunk's cache rows.

Shapes: B slots, E the trunk's hidden size, h the head's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mtpbuild.builder.checkpoint.config import HEAD
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import RMSNorm
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.common.weight import StoredTensor, Weight, product, vector
from mtpbuild.builder.models.gemma4.assistant_config import AssistantConfig
from mtpbuild.builder.models.gemma4.model import GemmaLayer, WindowPositions
from mtpbuild.builder.models.gemma4.weights import list_layer_weights

TO = "mtp.0"
# The embedding, if a checkpoint has it twice; the groups of tokens of GGUF files.
LEFT_OUT = ("lm_head.", "masked_embd", "mtp_centroids", "mtp_token_ordering")


class TokenGroups(nn.Module):
    """Groups of tokens round centroids; only those of the nearest centroids can be drafted."""

    def __init__(self, c: AssistantConfig) -> None:
        super().__init__()
        self.count, self.nearest = c.num_centroids, c.centroid_intermediate_top_k
        self.centroids = parameter(c.hidden_size, c.num_centroids)
        self.token_ordering = parameter(c.vocab_size)  # ids, group by group

    def logits(self, x: Tensor, head: Any) -> Tensor:
        """Return logits [B, 1, V] of x [B, 1, h]; other tokens have less than the least."""
        chosen = (x @ self.centroids).topk(self.nearest, dim=-1).indices
        groups = self.token_ordering.long().view(self.count, -1)
        ids = groups[chosen].flatten(-2)
        rows = head.look_up(ids) if hasattr(head, "look_up") else head.mT[ids]
        near = (cast(rows, torch.float32) * cast(x, torch.float32)[:, :, None]).sum(-1)
        least = near.amin(-1, keepdim=True) - 1.0
        every = least.expand(*least.shape[:-1], self.token_ordering.shape[0])
        return every.scatter(-1, ids, near)


class AssistantHead(nn.Module):
    """The head: it runs once for each draft, at one position."""

    def __init__(self, c: AssistantConfig) -> None:
        super().__init__()
        E, h = c.backbone_hidden_size, c.hidden_size
        self.pre_projection, self.post_projection = parameter(2 * E, h), parameter(h, E)
        self.layers = nn.ModuleList(GemmaLayer(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(h, c.rms_norm_eps)
        self.lm_head = parameter(h, c.vocab_size)
        self.groups = TokenGroups(c) if c.use_ordered_embeddings else None

    def forward(
        self, embedding: Tensor, hidden: Tensor, rows: WindowPositions, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the head on a token's embedding and a hidden state of the trunk, each [B, 1, E].

        rows: the trunk's, with the head's own angles; the fresh ones are seen up to last [B].
        Returns its normed state [B, 1, h], and the next draft's hidden state [B, 1, E].
        """
        x = torch.cat([embedding, hidden], dim=-1) @ self.pre_projection
        for layer in self.layers:
            assert isinstance(layer, GemmaLayer)
            attention = layer.self_attn
            q, _ = attention.write(layer.input_layernorm(x), None, rows)
            # transformers lets it see one row more than the trunk's window.
            x = layer.finish(x, attention.attend(q, rows, last, wider=1))
        x = self.norm(x)
        return x, x @ self.post_projection

    def compute_head_input(self, hidden: Tensor) -> Tensor:
        return hidden


def attach_assistant(model: CausalLM) -> None:
    """Put the head of a model's configuration in place of its modules."""
    c = model.config.head
    assert isinstance(c, AssistantConfig)
    model.mtp = nn.ModuleList([AssistantHead(c)])


def rename_tensor(name: str) -> str | None:
    """Return a tensor's name in the model; None for one that is not read."""
    return None if name.startswith(LEFT_OUT) else f"{HEAD}.{name.removeprefix('model.')}"


def list_assistant_weights(c: AssistantConfig) -> Iterator[Weight]:
    """Yield the rows of a weight table."""
    E, h = c.backbone_hidden_size, c.hidden_size
    yield product(f"{TO}.pre_projection", StoredTensor(f"{HEAD}.pre_projection.weight", (h, 2 * E)))
    for i in range(c.num_hidden_layers):
        yield from list_layer_weights(c, i, f"{HEAD}.layers.{i}", f"{TO}.layers.{i}")
    yield vector(f"{TO}.norm", f"{HEAD}.norm", "weight", h)
    yield product(f"{TO}.post_projection", StoredTensor(f"{HEAD}.post_projection.weight", (E, h)))
    head = StoredTensor(f"{HEAD}.embed_tokens.weight", (c.vocab_size, h))
    yield product(f"{TO}.lm_head", head)
    if c.use_ordered_embeddings:
        at = f"{HEAD}.masked_embedding"
        centroids = StoredTensor(f"{at}.centroids.weight", (c.num_centroids, h))
        yield product(f"{TO}.groups.centroids", centroids)
        ids = StoredTensor(f"{at}.token_ordering", (c.vocab_size,), has_ids=True)
        yield Weight(f"{TO}.groups.token_ordering", (ids,))
