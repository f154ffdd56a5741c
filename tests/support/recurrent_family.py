"""A family with recurrent states: its first and last layers keep a running sum, and no rows.

The layer between them, and the MTP module, are those of `toy_family.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import (
    MLP,
    DecoderLayer,
    MTPModule,
    Positions,
    RecurrentLayer,
    RMSNorm,
    Rope,
    State,
)
from mtpbuild.builder.models.common.precision import parameter
from mtpbuild.builder.models.common.weight import Share, StoredTensor, Weight, product, vector
from mtpbuild.builder.models.family import Recurrent
from mtpbuild.runtime.ranks import Ranks
from tests.support import toy_family
from tests.support.toy_family import PlainNorm, PlainToy, ToyAttention, ToyConfig

CONFIG = toy_family.CONFIG | {
    "architectures": ["SummingForCausalLM"], "model_type": "summing", "num_hidden_layers": 3,
}  # fmt: skip
SUMMING = (0, 2)  # layers


@dataclass(frozen=True, kw_only=True)
class SummingConfig(ToyConfig):
    """The toy family's settings."""


class RunningSum(RecurrentLayer):
    """x += norm(sum of all x so far) @ proj."""

    states = ("sum",)

    def __init__(self, c: SummingConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.proj = parameter(c.hidden_size, c.hidden_size)

    def forward(self, x: Tensor, state: State, rows: Positions) -> tuple[Tensor, State]:
        sums = state["sum"][:, None] + x.cumsum(1)
        return x + self.norm(sums) @ self.proj, {"sums": sums}

    def advance(self, state: State, tokens: State, n: Tensor) -> State:
        behind = torch.cat([state["sum"][:, None], tokens["sums"]], dim=1)  # [B, T + 1, E]
        index = n[:, None, None].expand(-1, 1, behind.shape[2])
        return {"sum": behind.gather(1, index)[:, 0]}


class Summing(CausalLM):
    def __init__(self, c: SummingConfig, ranks: Ranks) -> None:
        def block() -> tuple[SummingConfig, ToyAttention, MLP, Ranks]:
            return c, ToyAttention(c, ranks), MLP(c.hidden_size, c.intermediate_size), ranks

        layers = [RunningSum(c) if i in SUMMING else DecoderLayer(*block()) for i in range(3)]
        super().__init__(c, layers, [MTPModule(*block())], Rope(c.rope, c.head_dim), ranks)


def weight_table(c: SummingConfig, share: Share) -> list[Weight]:
    E, taken = c.hidden_size, tuple(f"layers.{i}." for i in SUMMING)
    table = [w for w in toy_family.weight_table(c, share) if not w.name.startswith(taken)]
    for i in SUMMING:
        at, to = f"model.layers.{i}", f"layers.{i}"
        table.append(vector(to, at, "norm.weight", E))
        table.append(product(f"{to}.proj", StoredTensor(f"{at}.proj.weight", (E, E))))
    return table


class PlainSum(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.proj = PlainNorm(size), nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.stack([x[:, : p + 1].sum(1) for p in range(x.shape[1])], dim=1)
        return x + self.proj(self.norm(sums))


class PlainSumming(PlainToy):
    """Whole sequences: a sum is computed anew at every position."""

    def __init__(self, c: ToyConfig) -> None:
        super().__init__(c)
        layers = self.model["layers"]
        assert isinstance(layers, nn.ModuleList)
        for i in SUMMING:
            layers[i] = PlainSum(c.hidden_size)

    @property
    def layers(self) -> list[Any]:
        return [*self.model["layers"].children()]


def cache_widths(c: SummingConfig, ranks: Ranks) -> list[int]:
    widths = toy_family.cache_widths(c, ranks)
    return [0 if i in SUMMING else width for i, width in enumerate(widths)]


def recurrent(c: SummingConfig, ranks: Ranks) -> list[Recurrent]:
    return [Recurrent("sum", i, {"hidden": c.hidden_size}) for i in SUMMING]


SUMS = replace(
    toy_family.TOY,
    name="SummingForCausalLM",
    architectures=("SummingForCausalLM",),
    model_type="summing",
    config=SummingConfig,
    make_model=Summing,
    weight_table=weight_table,
    cache_widths=cache_widths,
    recurrent=recurrent,
    reference=PlainSumming,
)


def make_summing() -> PlainSumming:
    """Random weights, as `make_toy` makes them; sums weigh enough to change what is said."""
    torch.manual_seed(0)
    model = PlainSumming(SummingConfig.parse(CONFIG)).eval()
    return toy_family.fill_toy(model)
