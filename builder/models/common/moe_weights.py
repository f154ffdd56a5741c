"""The weights of a layer's feed-forward: a dense MLP, or a router and its experts."""

from __future__ import annotations  # Tensor is imported for types alone

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from mtpbuild.builder.checkpoint.config import ModelConfig, MoEConfig
from mtpbuild.builder.lazy_torch import torch
from mtpbuild.builder.models.common.moe_config import computes_all_experts
from mtpbuild.builder.models.common.weight import (
    Share,
    StoredTensor,
    Weight,
    mlp,
    product,
    projection,
    vector,
)

if TYPE_CHECKING:
    from torch import Tensor

STACKS = ("gate_up_proj", "down_proj")
PROJECTIONS = ("gate", "up", "down")


def list_feed_forward_weights(
    c: ModelConfig, share: Share, index: int, at: str, to: str
) -> Iterator[Weight]:
    """Yield the weights of a dense MLP, or of a router and its experts."""
    if isinstance(c, MoEConfig) and c.is_moe(index):
        return moe_weights(c, share, at, to)
    return mlp(c.hidden_size, c.intermediate_size, at, to)


def moe_weights(c: MoEConfig, s: Share, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights of router and experts, in the form of `DenseMoE` or `GatheredMoE`."""
    dense = computes_all_experts(c)
    separate = c.n_shared_experts > 0 and (not dense or s.ranks.attention_dp)
    inner = c.moe_intermediate_size * c.n_shared_experts
    gate = StoredTensor(f"{at}.gate.weight", (c.n_routed_experts, c.hidden_size))
    yield Weight(f"{to}.gate.weight", (gate,), lambda w: w.T)
    if not c.softmax_router:
        yield vector(to, at, "gate.e_score_correction_bias", c.n_routed_experts)
    E = c.hidden_size
    size = c.moe_intermediate_size
    ids = s.experts(c.n_routed_experts)
    stored = list_projections(f"{at}.experts", ids, E, size)
    if c.n_shared_experts and not separate:  # one MLP for all shared experts, after the routed ones
        for proj, routed in zip(PROJECTIONS, stored, strict=True):
            routed.append(projection(f"{at}.shared_experts", proj, c.hidden_size, inner))
    if dense:
        gates, ups, downs = stored
        yield product(f"{to}.experts.gate_up_proj", *gates, *ups)
        yield product(f"{to}.experts.down_proj", *downs, rows=lambda *w: torch.cat(w, 1), axis=1)
    else:
        yield from stack_experts(to, stored)
    if separate:
        yield from mlp(c.hidden_size, inner, f"{at}.shared_experts", f"{to}.shared_experts")


def list_projections(
    experts: str, ids: Iterable[int], hidden: int, inner: int
) -> list[list[StoredTensor]]:
    """Return the stored gates, ups and downs of routed experts."""
    return [
        [projection(f"{experts}.{e}", proj, hidden, inner, routed=True) for e in ids]
        for proj in PROJECTIONS
    ]


def stack_experts(to: str, stored: Sequence[Sequence[StoredTensor]]) -> Iterator[Weight]:
    """Yield the stacks of experts: each is a slice, whose gate and up are one product."""
    gates, ups, downs = stored
    pairs = tuple(chain.from_iterable(zip(gates, ups, strict=True)))
    yield Weight(f"{to}.gate_up_proj", pairs, make_slice, slices=len(gates), concat_axis=0)
    yield Weight(f"{to}.down_proj", tuple(downs), make_slice, slices=len(downs), concat_axis=0)


def make_slice(*w: Tensor) -> Tensor:
    return torch.cat(w).T[None]


def with_shared(table: Sequence[Weight], modules: Set[str]) -> list[Weight]:
    """Make the shared expert of these MoE modules the last slice of the routed experts' stacks."""
    by_name = {weight.name: weight for weight in table}
    weights = list[Weight]()
    joined = {f"{module}.shared_experts" for module in modules}
    for weight in table:
        module, _, leaf = weight.name.rpartition(".")
        if module in modules and leaf in STACKS:
            stored = (*weight.stored, *by_name[f"{module}.shared_experts.{leaf}"].stored)
            weights.append(replace(weight, stored=stored, slices=weight.slices + 1))
        elif module not in joined:
            weights.append(weight)
    return weights


def find_modules_like_routed(table: Sequence[Weight], share: Share) -> set[str]:
    """Return the MoE modules whose shared expert has the shape of a routed one in this share."""
    by_name = {weight.name: weight for weight in table}
    alike = set[str]()
    for weight in table:
        module, _, leaf = weight.name.rpartition(".")
        shared = by_name.get(f"{module}.shared_experts.{leaf}")
        gated = f"{module}.shared_experts.gate" in by_name
        if shared is None or gated or weight.slices == 1 or leaf != STACKS[0]:
            continue
        if [*map(share.shape, next(weight.slices_of_stored))] == [*map(share.shape, shared.stored)]:
            alike.add(module)
    return alike
