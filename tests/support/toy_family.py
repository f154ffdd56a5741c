"""A family in one file: grouped-query attention without a latent, dense MLPs, one MTP module.

Two key-value heads serve four query heads. A cache row holds both heads' keys, then their values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.checkpoint.config import ModelConfig, integer
from mtpbuild.builder.models.common.causal_lm import UniformLM
from mtpbuild.builder.models.common.layers import Attention, Positions
from mtpbuild.builder.models.common.moe_weights import list_feed_forward_weights
from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.models.common.precision import parameter
from mtpbuild.builder.models.common.weight import (
    Share,
    StoredTensor,
    Weight,
    make_weight_table,
    product,
)
from mtpbuild.builder.models.costs import Costs, Split
from mtpbuild.builder.models.family import Family
from mtpbuild.runtime.ranks import Ranks
from tests.support.checkpoints import randomise

CONFIG: dict[str, Any] = {
    "architectures": ["ToyForCausalLM"], "model_type": "toy", "vocab_size": 53, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 256, "rope_theta": 1000.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ToyConfig(ModelConfig):
    num_attention_heads: int = integer()
    num_key_value_heads: int = integer()
    head_dim: int = integer()


class ToyAttention(Attention):
    """Attends with plain PyTorch operators over the cache and the pass's own rows."""

    def __init__(self, c: ToyConfig, ranks: Ranks) -> None:
        super().__init__()
        self.heads, self.groups = c.num_attention_heads, c.num_key_value_heads // ranks.parts
        self.heads //= ranks.parts
        self.width = c.head_dim
        self.qkv_proj = parameter(c.hidden_size, (self.heads + 2 * self.groups) * c.head_dim)
        self.o_proj = parameter(self.heads * c.head_dim, c.hidden_size)

    def project(self, x: Tensor, rows: Positions) -> tuple[Tensor, Tensor]:
        sizes = [n * self.width for n in (self.heads, self.groups, self.groups)]
        q, k, v = (x @ self.qkv_proj).split(sizes, dim=-1)
        return self.turned(q, rows), torch.cat([self.turned(k, rows), v], dim=-1)[:, None]

    def turned(self, x: Tensor, rows: Positions) -> Tensor:
        """Rotate the halves of every head of x [B, T, heads * width]."""
        cos, sin = rows.cos[:, :, None], rows.sin[:, :, None]
        a, b = x.unflatten(-1, (-1, self.width)).chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)

    def attend(
        self, q: Tensor, rows: Positions, cache: Tensor, fresh: Tensor, first: Tensor
    ) -> Tensor:
        T, S, fresh_rows = q.shape[1], cache.shape[2], fresh.shape[2]
        last = first[:, None] + torch.arange(T, device=q.device)
        old = torch.arange(S, device=q.device) < rows.base[:, None, None]  # [B, 1, S]
        new = torch.arange(fresh_rows, device=q.device) <= last[..., None]  # [B, T, F]
        seen = torch.cat([old.expand(-1, T, -1), new], dim=-1)[:, None, None]  # [B, 1, 1, T, S + F]
        k, v = torch.cat([cache, fresh], dim=2)[:, 0].chunk(2, dim=-1)
        k, v = (x.unflatten(-1, (self.groups, -1)).transpose(1, 2)[:, :, None] for x in (k, v))
        q = q.unflatten(-1, (self.groups, -1, self.width)).permute(0, 2, 3, 1, 4)  # [B, G, n, T, w]
        scores = (q @ k.mT * self.width**-0.5).masked_fill(~seen, float("-inf"))
        o = (scores.softmax(-1) @ v).permute(0, 3, 1, 2, 4)
        return o.flatten(2) @ self.o_proj


def make_toy_model(c: ToyConfig, ranks: Ranks) -> UniformLM:
    return UniformLM(c, lambda layer: ToyAttention(c, ranks), c.head_dim, ranks)


def weight_table(c: ToyConfig, share: Share) -> list[Weight]:
    feed_forward = partial(list_feed_forward_weights, c, share)
    return make_weight_table(c, partial(attention_weights, c), feed_forward)


def attention_weights(c: ToyConfig, index: int, at: str, to: str) -> Iterator[Weight]:
    E, rows = c.hidden_size, c.num_attention_heads * c.head_dim
    heads = {"q": rows, "k": c.num_key_value_heads * c.head_dim}
    heads["v"] = heads["k"]
    qkv = (
        StoredTensor(f"{at}.self_attn.{n}_proj.weight", (r, E), axis=0) for n, r in heads.items()
    )
    yield product(f"{to}.self_attn.qkv_proj", *qkv)
    o_proj = StoredTensor(f"{at}.self_attn.o_proj.weight", (E, rows), axis=1)
    yield product(f"{to}.self_attn.o_proj", o_proj)


def cache_widths(c: ToyConfig, ranks: Ranks) -> list[int]:
    """Return the width of each layer's cache rows: keys and values, which ranks split by heads."""
    width = 2 * c.num_key_value_heads * c.head_dim // ranks.parts
    return [width] * (c.num_hidden_layers + c.num_nextn_predict_layers)


def split_sizes(c: ToyConfig, ranks: Ranks) -> list[Split]:
    sizes = ("num_key_value_heads", "vocab_size", "intermediate_size")
    return [Split(size, getattr(c, size), ranks.parts) for size in sizes]


def costs(c: ToyConfig, ranks: Ranks) -> Costs:
    rows = c.num_attention_heads * c.head_dim / ranks.parts
    return Costs(row_operations=4.0 * rows, activations=3.0 * c.intermediate_size)


class PlainNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class PlainLayer(nn.Module):
    """A decoder layer, with a module's additions; it computes each head by itself."""

    def __init__(self, c: ToyConfig, module: bool) -> None:
        super().__init__()
        self.config, E, w = c, c.hidden_size, c.head_dim
        heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads, "v": c.num_key_value_heads}
        self.input_layernorm, self.post_attention_layernorm = PlainNorm(E), PlainNorm(E)
        self.self_attn = nn.ModuleDict(
            {f"{name}_proj": nn.Linear(E, n * w, bias=False) for name, n in heads.items()}
            | {"o_proj": nn.Linear(heads["q"] * w, E, bias=False)}
        )
        shapes = {"gate": (E, c.intermediate_size), "up": (E, c.intermediate_size)}
        shapes["down"] = (c.intermediate_size, E)
        self.mlp = nn.ModuleDict(
            {f"{name}_proj": nn.Linear(*shape, bias=False) for name, shape in shapes.items()}
        )
        if module:
            self.enorm, self.hnorm = PlainNorm(E), PlainNorm(E)
            self.eh_proj = nn.Linear(2 * E, E, bias=False)
            self.shared_head = nn.ModuleDict({"norm": PlainNorm(E)})

    def attention(self, x: Tensor) -> Tensor:
        c, T = self.config, x.shape[1]
        pairs = torch.arange(0, c.head_dim, 2) / c.head_dim
        turns = torch.arange(T)[:, None] * c.rope.theta**-pairs
        mask = torch.full((T, T), float("-inf")).triu(1)
        q, k, v = (self.self_attn[f"{n}_proj"](x).split(c.head_dim, -1) for n in "qkv")
        outputs, share = [], len(q) // len(k)
        for head, query in enumerate(q):
            a, b = turned(query, turns), turned(k[head // share], turns)
            p = (a @ b.mT / c.head_dim**0.5 + mask).softmax(-1)
            outputs.append(p @ v[head // share])
        return self.self_attn["o_proj"](torch.cat(outputs, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        y, mlp = self.post_attention_layernorm(x), self.mlp
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class PlainToy(PlainLM):
    """A model of whole sequences, without caches, that shares nothing with the program's model."""

    config: ToyConfig

    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.config, L = c, c.num_hidden_layers
        layers = (PlainLayer(c, module=i >= L) for i in range(L + c.num_nextn_predict_layers))
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(c.vocab_size, c.hidden_size),
                "layers": nn.ModuleList(layers),
                "norm": PlainNorm(c.hidden_size),
            }
        )
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    @property
    def layers(self) -> list[PlainLayer]:
        return [x for x in self.modules() if isinstance(x, PlainLayer)]

    def main(self, tokens: Tensor) -> Tensor:
        x = self.model["embed_tokens"](tokens)
        for layer in self.layers[: self.config.num_hidden_layers]:
            x = layer(x)
        return self.model["norm"](x)

    def mtp(self, k: int, tokens: Tensor, hidden: Tensor, later: int = 0) -> Tensor:
        module = self.layers[self.config.num_hidden_layers + k - 1]
        embedding = module.enorm(self.model["embed_tokens"](tokens))
        x = module.eh_proj(torch.cat([embedding, module.hnorm(hidden)], dim=-1))
        return module.shared_head["norm"](module(x))


AnyToy = TypeVar("AnyToy", bound=PlainToy)
TOY = Family(
    name="ToyForCausalLM",
    architectures=("ToyForCausalLM",),
    model_type="toy",
    config=ToyConfig,
    make_model=make_toy_model,
    weight_table=weight_table,
    copies=lambda c: [],
    cache_widths=cache_widths,
    split_sizes=split_sizes,
    costs=costs,
    reference=PlainToy,
)


def make_toy(seed: int = 0) -> PlainToy:
    """Make random weights with which a token is often followed by its fixed permutation.

    The module knows it too, so drafts are often right. Attention matters enough to change the text.
    """
    torch.manual_seed(seed)
    return fill_toy(PlainToy(ToyConfig.parse(CONFIG)).eval())


def fill_toy(model: AnyToy) -> AnyToy:
    """Give a model such weights."""
    randomise(model)
    with torch.no_grad():
        embedding = model.model["embed_tokens"].weight
        assert isinstance(embedding, Tensor)
        embedding.normal_()
        model.lm_head.weight[torch.randperm(len(embedding))] += embedding
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.6 if "attn" in name else 0.12)
        module, E = model.layers[-1], model.config.hidden_size
        module.eh_proj.weight.normal_(std=0.1)
        module.eh_proj.weight[:, :E] += torch.eye(E)
    return model
