"""An EAGLE-3 head in the step program: in place of the trunk's MTP modules."""

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.grouped import GroupedAttention
from mtpbuild.builder.models.common.layers import MLP, DraftLayer, Positions, RMSNorm, Rope
from mtpbuild.builder.models.common.precision import parameter
from mtpbuild.builder.models.eagle3.config import Eagle3Config
from mtpbuild.runtime.ranks import ALONE


def attach_head(model: CausalLM) -> CausalLM:
    """Put the head of a model's configuration in place of its modules."""
    c = model.config.head
    assert isinstance(c, Eagle3Config)
    head = Eagle3Module(c)
    model.mtp = nn.ModuleList([head])
    model.taps, model.join_taps = c.taps or (), head.join_taps
    model.head_rope = Rope(c.rope, c.rotary_dim)
    if c.has_head:
        head.lm_head = parameter(c.hidden_size, c.drafted)
        model.draft_head = None
    return model


class PairNorm(nn.Module):
    """The norms of a token's embedding and of g, which lie side by side."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.embedding, self.hidden = RMSNorm(size, eps), RMSNorm(size, eps)

    def forward(self, x: Tensor) -> Tensor:
        e, g = x.chunk(2, dim=-1)
        return torch.cat([self.embedding(e), self.hidden(g)], dim=-1)


class Eagle3Module(DraftLayer):
    """The head's layer over [embedding ; g], whose output is the next g."""

    input_layernorm: PairNorm  # type: ignore[assignment]

    def __init__(self, c: Eagle3Config) -> None:
        h, inputs = c.hidden_size, len(c.taps or ()) * c.target_hidden_size
        attention = GroupedAttention(c, ALONE, inputs=2 * h)
        super().__init__(c, attention, MLP(h, c.intermediate_size), ALONE)
        self.config = c
        self.input_layernorm = PairNorm(h, c.rms_norm_eps)
        self.norm = RMSNorm(h, c.rms_norm_eps)
        self.input_norm = RMSNorm(inputs, c.rms_norm_eps) if inputs and c.norm_before_fc else None
        taps = (c.taps or ()) if c.fc_norm else ()
        self.fc_norm = nn.ModuleList(RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in taps)
        self.fc = parameter(inputs, h) if inputs else None
        self.embed_tokens = parameter(c.vocab_size, h) if c.embeds else None
        self.lm_head = None

    def join_taps(self, taps: list[Tensor], hidden: Tensor) -> Tensor:
        """Return g [B, T, h] of verified tokens from the taps, or the last hidden state."""
        if self.fc is None:
            return hidden
        if self.fc_norm:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        x = torch.cat(taps, dim=-1)
        return (x if self.input_norm is None else self.input_norm(x)) @ self.fc

    def combine_inputs(self, embedding: Tensor, hidden: Tensor, rows: Positions) -> Tensor:
        """Return the layer's input [B, T, 2 h]; hidden ends with g, after the trunk's own."""
        return torch.cat([embedding, hidden[..., -self.config.hidden_size :]], dim=-1)

    def finish(
        self, x: Tensor, q: Tensor, rows: Positions, cache: Tensor, fresh: Tensor, first: Tensor
    ) -> Tensor:
        g = x.chunk(2, dim=-1)[1]
        if self.config.norm_before_residual:
            g = self.input_layernorm.hidden(g)
        return super().finish(g, q, rows, cache, fresh, first)

    def compute_next_hidden(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.config.norm_output else x

    def compute_head_input(self, hidden: Tensor) -> Tensor:
        return hidden if self.config.norm_output else self.norm(hidden)
