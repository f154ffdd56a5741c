"""moe_route and moe: choose experts by sigmoid scores in groups, and run them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import KEPT, Node, define
from mtpbuild.plugins.gelu_gate.op import apply_gate
from mtpbuild.plugins.matmul_scaled.op import dequantise

MAX_TOKENS = 256  # per call of the kernel
NO_EXPERT = -1  # the id of an expert on another rank


def empty_routes(logits: Tensor, experts: int, always: int) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the results of moe_route."""
    weights = logits.new_empty(*logits.shape[:-1], experts + always)
    return weights, torch.empty_like(weights, dtype=torch.int32)


@define(empty_routes, Node("Route", renamed={"kept_groups": "kept"}))
def moe_route(
    logits: Tensor,
    bias: Tensor,
    groups: int,
    kept_groups: int,
    experts: int,
    normalise: bool,
    factor: float,
    always: int = 0,
) -> tuple[Tensor, Tensor]:
    """Choose experts by logits [.., X] fp32 and a bias [X]; return weights and int32 ids [.., k].

    k is `experts` + `always`: every token also gets the shared experts X, X + 1, .. with weight 1.

    Biased scores select the experts, unbiased scores are their weights. The experts are divided
    into `groups` equal groups. Only the `kept_groups` groups are searched whose two best biased
    scores have the largest sums. Ids are in order of falling biased score; ties go to the lowest
    id. Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """
    scores = logits.sigmoid()
    biased = scores + bias
    if kept_groups < groups:
        grouped = biased.unflatten(-1, (groups, -1))
        sums = grouped.topk(2, dim=-1).values.sum(-1)
        best = sums.sort(dim=-1, descending=True, stable=True).indices[..., :kept_groups]
        kept = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, best, True)
        biased = torch.where(kept[..., None], grouped, float("-inf")).flatten(-2)
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[..., :experts]
    weights = scores.gather(-1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return with_shared(weights * factor, ids.int(), logits.shape[-1], always)


@define(
    lambda logits, experts: empty_routes(logits, experts, 0),
    Node(
        "Route",
        attributes=lambda known: {
            "groups": 1, "kept": 1, "always": 0, "normalise": 1, "roots": 1,
        },
    ),
)  # fmt: skip
def root_route(
    logits: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    tokens: Tensor | None,
    experts: int,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Choose experts by logits [.., X] fp32; return weights and int32 ids [.., experts].

    A score is sqrt(softplus(logit)). The highest ones choose, with a bias [X] added, as in
    `moe_route`; without a bias the tokens [..] choose, by their rows of a table [V, experts] of
    ids in fp32. The weights are the scores over their sum, times a factor.
    """
    scores = F.softplus(logits).sqrt()
    if bias is not None:
        biased = scores + bias
        ids = biased.sort(dim=-1, descending=True, stable=True).indices[..., :experts]
    else:
        assert table is not None
        assert tokens is not None
        ids = F.embedding(tokens, table).long()
    weights = scores.gather(-1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * factor, ids.int()


def with_shared(weights: Tensor, ids: Tensor, routed: int, always: int) -> tuple[Tensor, Tensor]:
    """Append `always` shared experts, whose ids follow the routed ones, to weights and ids."""
    if not always:
        return weights, ids
    shared = torch.arange(routed, routed + always, dtype=ids.dtype, device=ids.device)
    ones = weights.new_ones(*weights.shape[:-1], always)
    return torch.cat([weights, ones], -1), torch.cat([ids, shared.expand(ones.shape)], -1)


@define(
    lambda x: torch.empty_like(x),
    fits=lambda *operands, gelu=False, limit=0.0: not gelu,
)
def moe(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_scales: Tensor | None = None,
    gate_up_scales_2: Tensor | None = None,
    down_scales: Tensor | None = None,
    down_scales_2: Tensor | None = None,
    most: int = 0,
    gelu: bool = False,
    limit: float = 0.0,
) -> Tensor:
    """Sum the outputs [N, E] of the experts ids [N, k] for x [N, E], with weights [N, k].

    gate_up_proj is [X, E, 2 I] (gate, then up), down_proj [X, I, E]. The id `NO_EXPERT` stands for
    an expert on another rank: it adds nothing, and on a GPU reads no weights. With scales the
    weights are in the layout of `matmul_scaled` and are rounded to x's type. Shared experts are ids
    like any other. The kernel takes up to `MAX_TOKENS` tokens and no gelu. most: the bound if N
    is a symbol. limit: as `apply_gate` has it.
    """
    chosen = ids.flatten().clamp(min=0)
    weights = torch.where(ids == NO_EXPERT, 0.0, weights)
    gate_up = _chosen(chosen, gate_up_proj, gate_up_scales, gate_up_scales_2)
    rows = x.repeat_interleave(ids.shape[1], dim=0)[:, None]  # [N k, 1, E]
    gate, up = (rows @ gate_up.type_as(x)).chunk(2, dim=-1)
    down = _chosen(chosen, down_proj, down_scales, down_scales_2)
    inner = apply_gate(gate, up, gelu, limit)
    y = inner @ down.type_as(x)
    return (y.reshape(*ids.shape, -1) * weights[..., None]).sum(1).type_as(x)


def run_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    *experts: Tensor | None,
    gelu: bool = False,
    limit: float = 0.0,
) -> Tensor:
    """Run `moe` for any number of tokens, in pieces that its kernel takes.

    A kernel that takes no symbolic number of tokens gets their upper bound: copies of the first
    token fill them up.
    """
    tokens = x.shape[0]
    padded = KEPT.get().padded_tokens
    if not moe.is_kept or gelu:
        return moe(x, weights, ids, *experts, gelu=gelu, limit=limit)
    known = isinstance(tokens, int)
    piece = padded or MAX_TOKENS
    max_tokens = tokens if known else upper_bound(tokens)
    if max_tokens <= piece and (known or padded is None):
        return moe(x, weights, ids, *experts, 0 if known else max_tokens, limit=limit)
    operands = [x, weights, ids]
    if not known:
        operands = [torch.cat([y, y[:1].expand(max_tokens, -1)])[:max_tokens] for y in operands]
    pieces = zip(*(operand.split(piece) for operand in operands), strict=True)
    return torch.cat([moe(*part, *experts, limit=limit) for part in pieces])[:tokens]


def upper_bound(size: Any) -> int:
    """Return the largest value of a symbolic size."""
    return int(size.node.shape_env.bound_sympy(size.node.expr).upper)


def _chosen(ids: Tensor, *weight: Tensor | None) -> Tensor:
    """Gather some experts' weights, dequantised if they have scales."""
    values, *scales = (part if part is None else part.index_select(0, ids) for part in weight)
    assert values is not None
    return values if scales[0] is None else dequantise(values, scales[0], scales[1])
