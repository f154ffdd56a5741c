"""The table from checkpoint tensors to a program's weights: name, sources, pure transform.

Sources are cut to the share of a rank. What families have in common: vectors, products, MLPs and
routed experts.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from mtpbuild.builder.models.common.copies import EMBEDDING, HEAD
from mtpbuild.builder.models.common.moe import DENSE_EXPERTS
from mtpbuild.builder.models.config import ModelConfig, MoEConfig
from mtpbuild.runtime.ranks import ALONE, Ranks

Transform = Callable[..., Tensor]
Sources = list["Source"]


def stack_rows(*w: Tensor) -> Tensor:
    """Projections of one input become one product: [out_i, ..] each -> [sum of out_i, ..]."""
    return torch.cat(w) if len(w) > 1 else w[0]


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint and the shape that the configuration demands."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None  # that ranks split; None: each holds all of it
    routed: bool = False  # a routed expert's: groups of ranks hold it, split by their columns


@dataclass(frozen=True)
class Share:
    """The part of a model that one of several ranks holds (spec/deepseek-v3.md section 5).

    The rank's number matters to weights alone: all ranks have the same graph.
    """

    ranks: Ranks = ALONE
    rank: int = 0

    def experts(self, count: int) -> range:
        """Ids of the routed experts that it holds of `count`, whole or a part of each.

        Groups are in the order of TensorRT-LLM: neighbours are in different ones.
        """
        size, group = count // self.ranks.ep, self.rank % self.ranks.ep
        return range(group * size, (group + 1) * size)

    def cut(self, source: Source, tensor: Tensor) -> Tensor:
        """This rank's part of a checkpoint's tensor, which must be among those that it holds."""
        parts, part = self.ranks.parts, self.rank
        if source.routed:
            parts, part = self.ranks.tp // self.ranks.ep, self.rank // self.ranks.ep
        if source.axis is None or parts == 1:
            return tensor
        size = tensor.shape[source.axis] // parts
        return tensor.narrow(source.axis, part * size, size)


WHOLE = Share()


@dataclass(frozen=True)
class Weight:
    """One parameter of the program (named as in its state_dict) and how it is made."""

    name: str
    sources: tuple[Source, ...]
    transform: Transform = stack_rows  # of one slice's sources
    rows: Transform | None = None  # of a product: as transform, but [out, ..], also for blocks
    slices: int = 1  # of what is stacked along a first axis
    joined: int | None = None  # of products: the sources' axis along which they are one
    looked_up: bool = False  # its rows are chosen by tokens
    per_head: bool = False  # a stack of products [H, in, out]

    @property
    def groups(self) -> Iterator[tuple[Source, ...]]:
        """The sources of each slice, which their transform makes rows of the weight."""
        size = len(self.sources) // self.slices
        return (self.sources[i : i + size] for i in range(0, len(self.sources), size))


def vector(to: str, at: str, name: str, size: int) -> Weight:
    """A vector that has the same name in the module `to` as in the checkpoint's `at`."""
    return Weight(f"{to}.{name}", (Source(f"{at}.{name}", (size,)),))


def embedding(to: str, source: Source) -> Weight:
    """Checkpoint [vocabulary, hidden] -> the same in the program."""
    return Weight(to, (source,), rows=stack_rows, looked_up=True)


def product(to: str, *sources: Source, rows: Transform = stack_rows, joined: int = 0) -> Weight:
    """Checkpoint [out, in] -> program [in, out]: the graph is `x @ w` without a Transpose."""
    return Weight(to, sources, lambda *w: rows(*w).T, rows, joined=joined)


def projection(at: str, proj: str, hidden: int, inner: int, routed: bool = False) -> Source:
    """An MLP's product; ranks split its inner columns."""
    down = proj == "down"
    shape = (hidden, inner) if down else (inner, hidden)
    return Source(f"{at}.{proj}_proj.weight", shape, int(down), routed)


def own_copies(c: ModelConfig, j: int, at: str, to: str) -> Iterator[Weight]:
    """Embedding and head of module j, where they are not the trunk's."""
    shape = (c.vocab_size, c.hidden_size)
    if j in c.own_embeddings:
        yield embedding(f"{to}.embed_tokens", Source(f"{at}.embed_tokens.weight", shape, axis=0))
    if j in c.own_heads:
        head = Source(f"{at}.shared_head.head.weight", shape, axis=0)
        yield product(f"{to}.lm_head", head, rows=drafted_rows(c) if c.draft_ids else stack_rows)


def drafted_rows(c: ModelConfig) -> Transform:
    """The rows of a head that drafts are chosen by."""
    ids = torch.tensor(c.draft_ids)
    return lambda head: head[ids]


def whole_table(
    c: ModelConfig, layer: Callable[[int, str], Iterator[Weight]], modules: Iterable[Weight]
) -> list[Weight]:
    """A whole table in the order of use; `layer` makes a layer's weights under the given name."""
    shape = (c.vocab_size, c.hidden_size)
    tokens = Source(EMBEDDING, shape, axis=0)
    head = tokens if c.tie_word_embeddings else Source(HEAD, shape, axis=0)
    reduced = [product("draft_head", head, rows=drafted_rows(c))] if c.draft_ids else []
    return [
        embedding("embed_tokens", tokens),
        *chain.from_iterable(layer(i, f"layers.{i}") for i in range(c.num_hidden_layers)),
        vector("norm", "model.norm", "weight", c.hidden_size),
        *modules,
        product("lm_head", head),
        *reduced,
    ]


def module_weights(
    c: ModelConfig, layer: Callable[[int, str], Iterator[Weight]]
) -> Iterator[Weight]:
    """The MTP modules' weights where they are layers behind the trunk's (DeepSeek, GLM)."""
    E = c.hidden_size
    for j in range(c.num_nextn_predict_layers):
        index, to = c.num_hidden_layers + j, f"mtp.{j}"
        at = f"model.layers.{index}"
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield vector(to, at, f"{norm}.weight", E)
        yield product(f"{to}.eh_proj", Source(f"{at}.eh_proj.weight", (E, 2 * E), axis=1))
        yield from layer(index, to)
        yield from own_copies(c, j, at, to)


def mlp(hidden: int, inner: int, at: str, to: str) -> Iterator[Weight]:
    gate, up, down = (projection(at, p, hidden, inner) for p in ("gate", "up", "down"))
    yield product(f"{to}.gate_up_proj", gate, up)
    yield product(f"{to}.down_proj", down)


def decoder_layer(
    c: ModelConfig, at: str, to: str, attention: Iterable[Weight], feed_forward: Iterable[Weight]
) -> Iterator[Weight]:
    """The weights of one layer, around those of its two halves."""
    yield vector(to, at, "input_layernorm.weight", c.hidden_size)
    yield from attention
    yield vector(to, at, "post_attention_layernorm.weight", c.hidden_size)
    yield from feed_forward


def feed_forward_weights(c: MoEConfig, s: Share, layer: int, at: str, to: str) -> Iterator[Weight]:
    if c.is_moe(layer):
        return moe(c, s, at, to)
    return mlp(c.hidden_size, c.intermediate_size, at, to)


def moe(c: MoEConfig, s: Share, at: str, to: str) -> Iterator[Weight]:
    """Router and experts, as `DenseMoE` has them if they are few, else as `GatheredMoE`."""
    dense = c.n_routed_experts <= DENSE_EXPERTS
    apart = c.n_shared_experts > 0 and (not dense or s.ranks.attention_dp)
    inner = c.moe_intermediate_size * c.n_shared_experts
    gate = Source(f"{at}.gate.weight", (c.n_routed_experts, c.hidden_size))
    yield Weight(f"{to}.gate.weight", (gate,), lambda w: w.T)
    yield vector(to, at, "gate.e_score_correction_bias", c.n_routed_experts)
    sources = [_experts(c, s, at, proj) for proj in ("gate", "up", "down")]
    if c.n_shared_experts and not apart:  # they are one MLP, behind the routed ones
        for proj, found in zip(("gate", "up", "down"), sources, strict=True):
            found.append(projection(f"{at}.shared_experts", proj, c.hidden_size, inner))
    yield from (_dense if dense else _gathered)(to, *sources)
    if apart:
        yield from mlp(c.hidden_size, inner, f"{at}.shared_experts", f"{to}.shared_experts")


def _experts(c: MoEConfig, s: Share, at: str, proj: str) -> Sources:
    E, inner = c.hidden_size, c.moe_intermediate_size
    ids = s.experts(c.n_routed_experts)
    return [projection(f"{at}.experts.{e}", proj, E, inner, routed=True) for e in ids]


def _dense(to: str, gate: Sources, up: Sources, down: Sources) -> Iterator[Weight]:
    yield product(f"{to}.experts.gate_up_proj", *gate, *up)
    yield product(f"{to}.experts.down_proj", *down, rows=lambda *w: torch.cat(w, dim=1), joined=1)


def _gathered(to: str, gate: Sources, up: Sources, down: Sources) -> Iterator[Weight]:
    """Each expert is a slice, whose gate and up are one product."""
    pairs = tuple(source for pair in zip(gate, up, strict=True) for source in pair)

    def stacked(*w: Tensor) -> Tensor:
        return torch.cat(w).T[None]

    yield Weight(f"{to}.gate_up_proj", pairs, stacked, slices=len(gate), joined=0)
    yield Weight(f"{to}.down_proj", tuple(down), stacked, slices=len(down), joined=0)


def by_outputs(weight: Weight) -> Weight:
    """Experts' weight as `ExpertRows` holds it: a gate's row, its up's, the next gate's."""

    def in_turn(*w: Tensor) -> Tensor:
        return torch.stack(w, dim=1).flatten(0, 1)[None]

    return replace(weight, name=f"{weight.name}.rows", transform=in_turn)


STACKS = ("gate_up_proj", "down_proj")


def with_shared(table: list[Weight], modules: set[str]) -> list[Weight]:
    """Make the shared expert of these MoE modules the last slice of the stacks of routed ones."""
    named = {weight.name: weight for weight in table}
    joined = {f"{module}.{leaf}": module for module in modules for leaf in STACKS}
    gone = {f"{module}.shared_experts.{leaf}" for module in modules for leaf in STACKS}

    def stacked(weight: Weight) -> Weight:
        if weight.name not in joined:
            return weight
        leaf = weight.name.rpartition(".")[2]
        last = named[f"{joined[weight.name]}.shared_experts.{leaf}"]
        return replace(weight, sources=(*weight.sources, *last.sources), slices=weight.slices + 1)

    return [stacked(weight) for weight in table if weight.name not in gone]


def like_routed(table: list[Weight], share: Share) -> set[str]:
    """Name the MoE modules that have one shared expert of a routed one's shape in this share."""
    named, found = {weight.name: weight for weight in table}, set[str]()

    def shapes(sources: tuple[Source, ...]) -> list[tuple[int, ...]]:
        return [share.cut(s, torch.empty(s.shape, device="meta")).shape for s in sources]

    for weight in table:
        module, _, leaf = weight.name.rpartition(".")
        shared = named.get(f"{module}.shared_experts.{leaf}")
        if shared is None or weight.slices == 1 or leaf != STACKS[0]:
            continue
        if shapes(next(weight.groups)) == shapes(shared.sources):
            found.add(module)
    return found
