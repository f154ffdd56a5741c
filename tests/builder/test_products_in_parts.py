"""A kernel sums the parts of a product that it alone reads; run by Triton's interpreter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.targets.inductor.gpu_passes import name_op
from mtpbuild.plugins import matmul_scaled, mla_queries, mla_rows_write
from tests.support.gpu_steps import ON_GPU, with_kernels
from tests.support.kernels import random_scaled

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")

TOKENS, DEPTH, QUERY, RANK, ROPE, HEADS, NOPE = 3, 2048, 24, 16, 8, 2, 12


class Projections(nn.Module):
    """What stands in front of latent attention, with the weights in fp8."""

    def __init__(self, read_twice: bool) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.read_twice = read_twice
        self.first = random_scaled(g, "fp8", DEPTH, QUERY + RANK + ROPE, size=DEPTH**-0.5)
        self.second = random_scaled(g, "fp8", QUERY, HEADS * (NOPE + ROPE), size=QUERY**-0.5)
        self.norms = torch.rand(QUERY, generator=g), torch.rand(RANK, generator=g)
        self.w_uk = torch.randn(HEADS, NOPE, RANK, generator=g)

    def forward(self, x: Tensor, angle: Tensor, cache: Tensor, start: Tensor) -> tuple[Tensor, ...]:
        turns = angle.cos(), angle.sin()
        a = matmul_scaled(x, *self.first)
        q, fresh, cache = mla_rows_write(a, *self.norms, *turns, cache, start, 1e-6, True)
        q = mla_queries(matmul_scaled(q, *self.second), self.w_uk, *turns, True)
        return (q, fresh, cache, a) if self.read_twice else (q, fresh, cache)


@pytest.mark.usefixtures("traced_without_running")
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch's own, of copied graphs
@pytest.mark.parametrize("read_twice", [False, True])
@torch.no_grad()
def test_who_sums(read_twice: bool) -> None:
    g = torch.Generator().manual_seed(2)
    model = Projections(read_twice)
    angle, start = torch.rand(1, TOKENS, ROPE // 2, generator=g), torch.tensor([5])
    cache = torch.randn(1, 1, 16, RANK + ROPE, generator=g)
    operands = torch.randn(1, TOKENS, DEPTH, generator=g), angle, cache, start
    wanted = model(*operands)
    plan: Any = SimpleNamespace(style=ON_GPU)
    lowered = with_kernels(
        TracedProgram("part", torch.export.export(model, operands), (), (), plan)
    )
    calls = [name_op(node).removeprefix("mtpbuild_triton::") for node in lowered.graph.nodes]
    first = "matmul_scaled" if read_twice else "matmul_scaled_parts"
    assert [name for name in calls if name.startswith("m")] == [
        *(first, "mla_rows_write", "matmul_scaled_parts", "mla_queries")
    ]
    got = lowered.module()(*operands)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
