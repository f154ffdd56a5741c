"""The weights of a layer's second half: a dense MLP, or a router and its experts."""

from collections.abc import Callable, Iterator, Set
from dataclasses import replace

import torch
from torch import Tensor

from mtpbuild.builder.models.common.moe import DENSE_EXPERTS
from mtpbuild.builder.models.config import MoEConfig
from mtpbuild.builder.weights import made
from mtpbuild.builder.weights.made import Share, Stored, Weight, mlp, product, projection, vector

STACKS = ("gate_up_proj", "down_proj")
PROJECTIONS = ("gate", "up", "down")


def moe_table(
    c: MoEConfig, s: Share, attention: Callable[[str, str], Iterator[Weight]]
) -> list[Weight]:
    """Returns the table of a model with experts whose MTP modules are layers behind the trunk's.

    attention(at, to) makes the weights of the module `to` from those that the checkpoint has at
    `at`.
    """

    def layer(index: int, to: str) -> Iterator[Weight]:
        at = f"model.layers.{index}"
        if c.is_moe(index):
            second = moe_weights(c, s, f"{at}.mlp", f"{to}.mlp")
        else:
            second = mlp(c.hidden_size, c.intermediate_size, f"{at}.mlp", f"{to}.mlp")
        return made.decoder_layer(
            c, at, to, attention(f"{at}.self_attn", f"{to}.self_attn"), second
        )

    return made.whole_table(c, layer, made.module_weights(c, layer))


def moe_weights(c: MoEConfig, s: Share, at: str, to: str) -> Iterator[Weight]:
    """Router and experts, as `DenseMoE` has them if they are few, else as `GatheredMoE`."""
    dense = c.n_routed_experts <= DENSE_EXPERTS
    apart = c.n_shared_experts > 0 and (not dense or s.ranks.attention_dp)
    inner = c.moe_intermediate_size * c.n_shared_experts
    gate = Stored(f"{at}.gate.weight", (c.n_routed_experts, c.hidden_size))
    yield Weight(f"{to}.gate.weight", (gate,), lambda w: w.T)
    yield vector(to, at, "gate.e_score_correction_bias", c.n_routed_experts)
    stored = [_experts(c, s, at, proj) for proj in PROJECTIONS]
    if c.n_shared_experts and not apart:  # they are one MLP, behind the routed ones
        for proj, found in zip(PROJECTIONS, stored, strict=True):
            found.append(projection(f"{at}.shared_experts", proj, c.hidden_size, inner))
    yield from (_dense if dense else _gathered)(to, *stored)
    if apart:
        yield from mlp(c.hidden_size, inner, f"{at}.shared_experts", f"{to}.shared_experts")


def _experts(c: MoEConfig, s: Share, at: str, proj: str) -> list[Stored]:
    E, inner = c.hidden_size, c.moe_intermediate_size
    ids = s.experts(c.n_routed_experts)
    return [projection(f"{at}.experts.{e}", proj, E, inner, routed=True) for e in ids]


def _dense(to: str, gate: list[Stored], up: list[Stored], down: list[Stored]) -> Iterator[Weight]:
    yield product(f"{to}.experts.gate_up_proj", *gate, *up)
    yield product(f"{to}.experts.down_proj", *down, rows=lambda *w: torch.cat(w, dim=1), joined=1)


def _gathered(
    to: str, gate: list[Stored], up: list[Stored], down: list[Stored]
) -> Iterator[Weight]:
    """Each expert is a slice, whose gate and up are one product."""
    pairs = tuple(stored for pair in zip(gate, up, strict=True) for stored in pair)

    def stacked(*w: Tensor) -> Tensor:
        return torch.cat(w).T[None]

    yield Weight(f"{to}.gate_up_proj", pairs, stacked, slices=len(gate), joined=0)
    yield Weight(f"{to}.down_proj", tuple(down), stacked, slices=len(down), joined=0)


def by_outputs(weight: Weight) -> Weight:
    """Experts' weight as `ExpertRows` holds it: a gate's row, its up's, the next gate's."""

    def in_turn(*w: Tensor) -> Tensor:
        return torch.stack(w, dim=1).flatten(0, 1)[None]

    return replace(weight, name=f"{weight.name}.rows", transform=in_turn)


def with_shared(table: list[Weight], modules: Set[str]) -> list[Weight]:
    """Make the shared expert of these MoE modules the last slice of the stacks of routed ones."""
    named = {weight.name: weight for weight in table}
    joined = {f"{module}.{leaf}": module for module in modules for leaf in STACKS}
    gone = {f"{module}.shared_experts.{leaf}" for module in modules for leaf in STACKS}

    def stacked(weight: Weight) -> Weight:
        if weight.name not in joined:
            return weight
        leaf = weight.name.rpartition(".")[2]
        last = named[f"{joined[weight.name]}.shared_experts.{leaf}"]
        return replace(weight, stored=(*weight.stored, *last.stored), slices=weight.slices + 1)

    return [stacked(weight) for weight in table if weight.name not in gone]


def like_routed(table: list[Weight], share: Share) -> set[str]:
    """Name the MoE modules that have one shared expert of a routed one's shape in this share."""
    named, found = {weight.name: weight for weight in table}, set[str]()

    for weight in table:
        module, _, leaf = weight.name.rpartition(".")
        shared = named.get(f"{module}.shared_experts.{leaf}")
        if shared is None or weight.slices == 1 or leaf != STACKS[0]:
            continue
        if [*map(share.shape, next(weight.groups))] == [*map(share.shape, shared.stored)]:
            found.add(module)
    return found
