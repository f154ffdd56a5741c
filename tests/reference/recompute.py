"""Oracles O1 to O3 in plain PyTorch: all is recomputed from the tokens, nothing is cached."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtpbuild.builder.models.common.plain import PlainDecoderLayer, PlainLM
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek, PlainLatentAttention


@torch.no_grad()
def next_logits(model: PlainLM, tokens: list[int]) -> Tensor:
    """Return logits [V] of the token after `tokens`."""
    return model.logits(model.main(torch.tensor([tokens])))[0, -1]


@torch.no_grad()
def row_logits(model: PlainLM, tokens: list[int]) -> Tensor:
    """Return logits [len(tokens), V]; row i is about the token after tokens[: i + 1]."""
    return model.logits(model.main(torch.tensor([tokens])))[0]


@torch.no_grad()
def greedy(model: PlainLM, tokens: list[int], count: int) -> list[int]:
    """Return the next `count` tokens, one whole forward pass for each."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(next_logits(model, tokens).argmax()))
    return tokens[-count:]


@torch.no_grad()
def draft_logits(
    model: PlainLM, tokens: list[int], nextn: int, drafter: str, drafts: Sequence[int] = ()
) -> list[Tensor]:
    """Compute the logits [V] of each draft after the known `tokens`.

    drafts: those that were drawn from them; without them a draft is their argmax.
    """
    if len(tokens) < 2:
        raise ValueError("drafting starts after the first emitted token")
    if drafter == "mtp-block":
        return model.draft_block(tokens, nextn, drafts)  # type: ignore[operator]
    return (_eagle if drafter == "mtp-eagle" else _vanilla)(model, tokens, nextn, drafts)


def _eagle(model: PlainLM, tokens: list[int], nextn: int, drafts: Sequence[int]) -> list[Tensor]:
    """Run module 1 over all slots, then with its newest output as one more slot's hidden state."""
    hidden = model.main(torch.tensor([tokens[:-1]]))
    follow = list(tokens[1:])
    found = []
    for k in range(nextn):
        g = model.mtp(1, torch.tensor([follow]), hidden, later=k)[:, -1:]
        found.append(model.draft_logits(1, g)[0, 0])
        hidden = torch.cat([hidden, g], dim=1)
        follow.append(drafts[k] if drafts else int(found[-1].argmax()))
    return found


def _vanilla(model: PlainLM, tokens: list[int], nextn: int, drafts: Sequence[int]) -> list[Tensor]:
    """Run module k over all slots, with the drafts so far as the tokens that are not known yet."""
    g = model.main(torch.tensor([tokens[:-1]]))
    follow = list(tokens)
    slots, found = len(tokens) - 1, []
    for k in range(1, nextn + 1):
        g = model.mtp(k, torch.tensor([follow[k : k + slots]]), g)
        found.append(model.draft_logits(k, g[:, -1:])[0, 0])
        follow.append(drafts[k - 1] if drafts else int(found[-1].argmax()))
    return found


@torch.no_grad()
def cache_rows(model: PlainDeepseek, tokens: list[int]) -> list[Tensor]:
    """Latent rows [T, C] of each main layer: normed latent, rotated key as the program lays it."""
    x, config = model.model.embed_tokens(torch.tensor([tokens])), model.config
    T, rows = len(tokens), []
    for layer in list(model.model.layers)[: config.num_hidden_layers]:
        assert isinstance(layer, PlainDecoderLayer)
        attention = layer.self_attn
        assert isinstance(attention, PlainLatentAttention)
        a = attention.kv_a_proj_with_mqa(layer.input_layernorm(x))
        latent, key = a.split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        even, odd = key[..., 0::2], key[..., 1::2]
        if not config.rope_interleave:
            even, odd = key.chunk(2, -1)
        cos, sin = model.cos[:T], model.sin[:T]
        turned = even * cos - odd * sin, odd * cos + even * sin
        key = (
            torch.stack(turned, -1).flatten(-2) if config.rope_interleave else torch.cat(turned, -1)
        )
        rows.append(torch.cat([attention.kv_a_layernorm(latent), key], -1)[0])
        x = layer(x, model.cos[:T], model.sin[:T])
    return rows
