"""A graph without branches says what the one with them says."""

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mtpbuild.builder.targets.inductor.gpu_passes import compute_both_branches
from mtpbuild.plugins.branch import when


def doubled(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return when((y > 0).any(), lambda a, b: (a * b, a + 1), lambda a, b: (-a, b - a), (x, y))


def halved(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x / 2, (y / 2 + x).relu()


class Branches(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, second = when((x > 0).all(), doubled, halved, (x, y))
        (third,) = when((y > 1).any(), lambda a: (a * 3,), lambda a: (a.clone(),), (second,))
        return first, second, third


def test_every_side() -> None:
    """A branch may stand in a branch, or take a branch's result."""
    model, cond = Branches(), torch.ops.higher_order.cond
    exported = torch.export.export(model, (torch.ones(2, 3), torch.ones(2, 3)))
    traced: Any = None  # the pass does not need it
    assert any(node.target is cond for node in exported.graph.nodes)
    compute_both_branches(exported, traced)
    assert not any(node.target is cond for node in exported.graph.nodes)
    plain = exported.module()
    for x, y in product((-1.0, 1.0), (-1.0, 1.0, 2.0)):
        operands = torch.full((2, 3), x), torch.full((2, 3), y)
        for got, wanted in zip(plain(*operands), model(*operands), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
