"""A plain model whose layers are in memory one at a time, to run texts through any model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mtpbuild.builder.models import ModelConfig, family_of
from mtpbuild.builder.models.common.copies import EMBEDDING
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.models.common.rope import rope_tables
from mtpbuild.builder.weights.stored import Checkpoint
from mtpbuild.runtime.errors import UsageError


class KnownEmbedding(nn.Module):
    """The rows of an embedding that some tokens need."""

    def __init__(self, checkpoint: Checkpoint, tokens: Tensor) -> None:
        super().__init__()
        self.tokens, rows, start = tokens.unique(), list[Tensor](), 0
        for piece in checkpoint.rows(EMBEDDING):
            end = start + len(piece)
            own = self.tokens[(self.tokens >= start) & (self.tokens < end)]
            rows.append(piece[own - start])
            start = end
        self.rows = torch.cat(rows)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows[torch.searchsorted(self.tokens, tokens.contiguous())]


class StreamedModel:
    """A checkpoint's plain model; of its weights only the embedding's known rows are in memory.

    Its head is the identity, so logits are the head's inputs.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, batches: Sequence[Tensor]
    ) -> None:
        self.checkpoint, self.config = checkpoint, replace(config, draft_ids=())
        self.family = family_of(config)
        with torch.device("meta"):
            plain = self.family.reference(self.config)
        if not isinstance(plain, PlainCausalLM) or _shares_choices(plain):
            raise UsageError(f"--calibrate: layers of {self.family.name} can't run one by one")
        self.plain = plain.eval().requires_grad_(False)
        self._names = {module: name for name, module in plain.named_modules()}
        longest = max(batch.shape[1] for batch in batches)
        plain.cos, plain.sin = rope_tables(config.rope, 2 * plain.cos.shape[-1], longest)
        plain.lm_head = nn.Identity()  # type: ignore[assignment]
        tokens = torch.cat([batch.flatten() for batch in batches])
        plain.model.embed_tokens = KnownEmbedding(checkpoint, tokens)  # type: ignore[assignment]

    @contextmanager
    def loaded(self, module: nn.Module) -> Iterator[dict[str, nn.Linear]]:
        """Hold a module's weights in memory; yield its products by their weights' names."""
        at, same = self._names[module], self.family.duplicates(self.config)
        names = {key: f"{at}.{key}" for key in module.state_dict()}
        weights = {key: self.checkpoint.read(same.get(name, name)) for key, name in names.items()}
        module.load_state_dict(weights, assign=True)
        try:
            yield {
                f"{at}.{name}.weight": part
                for name, part in module.named_modules()
                if isinstance(part, nn.Linear)
            }
        finally:
            module.to("meta")

    def run_layer(self, i: int, x: Tensor) -> Tensor:
        """Run main layer i, which is loaded, on hidden states x [B, T, E]."""
        rows = x.shape[1]
        layers: Any = self.plain.model.layers
        y: Tensor = layers[i](x, self.plain.cos[:rows], self.plain.sin[:rows])
        return y


def _shares_choices(plain: nn.Module) -> bool:
    """Return whether a layer attends to the rows that another one chose."""
    modules: Iterator[Any] = plain.modules()
    layers = (layer for layer in modules if hasattr(layer, "chooser"))
    return any(layer.chooser[0] is not layer for layer in layers)
