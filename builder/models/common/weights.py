"""The table from checkpoint tensors to a program's weights: name, sources, pure transform.

What families have in common: vectors, products, MLPs, routed experts, embedding and head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpbuild.builder.models.common.moe import DENSE_EXPERTS
from mtpbuild.builder.models.common.share import Share
from mtpbuild.builder.models.config import MoEConfig

Transform = Callable[..., Tensor]


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint and the shape that the configuration demands."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None  # that ranks split; None: each holds all of it
    routed: bool = False  # a routed expert's: groups of ranks hold it, split by their columns


@dataclass(frozen=True)
class Weight:
    """One parameter of the program (named as in its state_dict) and how it is made."""

    name: str
    sources: tuple[Source, ...]
    transform: Transform
    rows: Transform | None = None  # of a product: as transform, but [out, ..], also for blocks
    slices: int = 1  # of what is stacked along a first axis
    joined: int | None = None  # of products: the sources' axis along which they are one

    @property
    def groups(self) -> Iterator[tuple[Source, ...]]:
        """The sources of each slice; their transform is [1, ..] of the weight."""
        size = len(self.sources) // self.slices
        return (self.sources[i : i + size] for i in range(0, len(self.sources), size))


def product(to: str, sources: tuple[Source, ...], rows: Transform, joined: int = 0) -> Weight:
    """Checkpoint [out, in] -> program [in, out]: the graph is `x @ w` without a Transpose."""
    return Weight(to, sources, lambda *w: rows(*w).T, rows, joined=joined)


def vector(to: str, name: str, size: int) -> Weight:
    return Weight(to, (Source(name, (size,)),), keep)


def mlp(hidden: int, inner: int, at: str, to: str) -> Iterator[Weight]:
    gate, up, down = (projection(at, p, hidden, inner) for p in ("gate", "up", "down"))
    yield product(f"{to}.gate_up_proj", (gate, up), stack_rows)
    yield product(f"{to}.down_proj", (down,), keep)


def projection(at: str, proj: str, hidden: int, inner: int, routed: bool = False) -> Source:
    """One of an MLP's products; ranks split its inner columns."""
    down = proj == "down"
    shape = (hidden, inner) if down else (inner, hidden)
    return Source(f"{at}.{proj}_proj.weight", shape, int(down), routed)


def moe(c: MoEConfig, s: Share, at: str, to: str) -> Iterator[Weight]:
    """Router and experts, as `DenseMoE` has them if they are few, else as `GatheredMoE`."""
    dense = c.n_routed_experts <= DENSE_EXPERTS
    gate = Source(f"{at}.gate.weight", (c.n_routed_experts, c.hidden_size))
    yield Weight(f"{to}.gate.weight", (gate,), transpose)
    bias = "gate.e_score_correction_bias"
    yield vector(f"{to}.{bias}", f"{at}.{bias}", c.n_routed_experts)
    yield from (_dense if dense else _gathered)(c, s, at, to)
    if c.n_shared_experts and (not dense or s.ranks.attention_dp):
        inner = c.moe_intermediate_size * c.n_shared_experts
        yield from mlp(c.hidden_size, inner, f"{at}.shared_experts", f"{to}.shared_experts")


def _experts(
    c: MoEConfig, s: Share, at: str, proj: str, shared: bool = False
) -> tuple[Source, ...]:
    """A rank's routed experts, and behind them the shared ones, which are one MLP."""
    E, inner = c.hidden_size, c.moe_intermediate_size
    ids = s.experts(c.n_routed_experts)
    routed = tuple(projection(f"{at}.experts.{e}", proj, E, inner, routed=True) for e in ids)
    if not shared:
        return routed
    return (*routed, projection(f"{at}.shared_experts", proj, E, inner * c.n_shared_experts))


def _dense(c: MoEConfig, s: Share, at: str, to: str) -> Iterator[Weight]:
    shared = c.n_shared_experts > 0 and not s.ranks.attention_dp
    gate, up, down = (_experts(c, s, at, p, shared) for p in ("gate", "up", "down"))
    yield product(f"{to}.experts.gate_up_proj", gate + up, stack_rows)
    yield product(f"{to}.experts.down_proj", down, lambda *w: torch.cat(w, dim=1), joined=1)


def _gathered(c: MoEConfig, s: Share, at: str, to: str) -> Iterator[Weight]:
    gate, up, down = (_experts(c, s, at, p) for p in ("gate", "up", "down"))
    pairs = tuple(source for pair in zip(gate, up, strict=True) for source in pair)

    def gate_up(*w: Tensor) -> Tensor:
        return torch.stack([torch.cat(pair).T for pair in zip(w[::2], w[1::2], strict=True)])

    def downs(*w: Tensor) -> Tensor:
        return torch.stack([x.T for x in w])

    yield Weight(f"{to}.gate_up_proj", pairs, gate_up, slices=len(gate), joined=0)
    yield Weight(f"{to}.down_proj", down, downs, slices=len(down), joined=0)


def keep(w: Tensor) -> Tensor:
    return w


def transpose(w: Tensor) -> Tensor:
    return w.T


def stack_rows(*w: Tensor) -> Tensor:
    """Projections of one input become one product: [out_i, ..] each -> [sum of out_i, ..]."""
    return torch.cat(w)
