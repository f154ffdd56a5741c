"""softmax_route: choose experts by their logits."""

from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.moe.op import empty_routes


@define(
    lambda logits, experts: empty_routes(logits, experts, 0),
    Node("SoftmaxRoute"),
)
def softmax_route(logits: Tensor, scales: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Choose the highest logits [.., X] fp32; return weights and int32 ids [.., experts].

    A weight is the softmax over the chosen logits, times the expert's scale [X]. Ties go to the
    lowest id.
    """
    ordered = logits.sort(dim=-1, descending=True, stable=True)
    ids = ordered.indices[..., :experts]
    return ordered.values[..., :experts].softmax(-1) * scales[ids], ids.int()
