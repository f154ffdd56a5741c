"""Generates batches of text with the training model, with a cache but without drafts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model import TrainedModel
from qwen import DeltaAttention, links
from tokenizer import EOS_ID


class Cache:
    """Every trunk layer's rows or state for a batch of equally long sequences."""

    def __init__(self, model: TrainedModel) -> None:
        self.model, self.length = model, 0
        self.rows: list[tuple[Tensor, Tensor] | None] = [None] * len(model.layers)

    def advance(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Run tokens [B, T] with an additive mask [B, 1, T, past + T]; return [B, T, hidden]."""
        model, end = self.model, self.length + tokens.shape[1]
        cos, sin = model.cos[self.length : end], model.sin[self.length : end]
        x = F.embedding(tokens, model.embed)
        for i, layer in enumerate(model.layers):
            if isinstance(layer.attention, DeltaAttention):
                seen = links(mask, model.shape.linear_conv_kernel_dim)
                mixed, self.rows[i] = layer.attention.step(layer.input_norm(x), seen, self.rows[i])
            else:
                mixed = self.attend(i, layer.input_norm(x), cos, sin, mask)
            x = x + mixed
            x = x + layer.ffn(layer.post_norm(x))
        self.length = end
        return model.norm(x)

    def attend(self, i: int, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        attention = self.model.layers[i].attention
        q, k, v, *gate = attention.project(x, cos, sin)
        if (past := self.rows[i]) is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        self.rows[i] = (k, v)
        return attention.output(((q @ k.mT) + mask).softmax(-1) @ v, *gate)


def pick(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1).squeeze(-1)


@torch.no_grad()
def continuations(
    model: TrainedModel,
    prompts: Tensor,
    count: int,
    temperature: float = 0.0,
    pad: Tensor | None = None,
) -> Tensor:
    """Return prompts [B, P] with up to `count` more tokens; an ended row repeats the end token.

    `pad` [B] is the number of padding tokens at the start of a row; nothing attends to them.
    """
    at = torch.arange(prompts.shape[1] + count)
    hidden_keys = torch.zeros(len(prompts), len(at), dtype=torch.bool)
    if pad is not None:
        hidden_keys = at < pad[:, None]
    blocked = torch.where(hidden_keys, -1e9, 0.0)[:, None, None]  # [B, 1, 1, keys]
    size = prompts.shape[1]
    causal = torch.where(at[:size, None] >= at[None, :size], 0.0, -1e9)
    cache = Cache(model)
    hidden = cache.advance(prompts, causal + blocked[..., :size])
    text, ended = prompts, torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(count):
        new = pick(model.logits(hidden[:, -1]), temperature)
        new = torch.where(ended, EOS_ID, new)
        ended |= new == EOS_ID
        text = torch.cat([text, new[:, None]], 1)
        if ended.all():
            break
        hidden = cache.advance(new[:, None], blocked[..., : text.shape[1]])
    return text
