"""What a program holds beside weights and state is estimated from its graph."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from mtpbuild.builder.compiler.temporary import count_temporary_bytes
from mtpbuild.builder.program.trace import TracedProgram

HEADS, WIDTH, ROWS, TOKENS = 4, 8, 512, 96


class Attention(nn.Module):
    """Expands keys and values of all rows, as a prompt does."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(HEADS, WIDTH, 16))
        self.values = nn.Parameter(torch.randn(HEADS, WIDTH, 32))

    def forward(self, q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        k, v = cache @ self.keys, cache @ self.values  # [H, S, ..]
        mask = torch.where(torch.arange(cache.shape[0]) < 5, 0.0, float("-inf"))
        p = (q @ k.mT * 0.5 + mask).softmax(-1)
        return p @ v, cache + 1


def test_scores_and_keys_of_the_largest_prompt() -> None:
    """Scores, weights and values are held at once; what fuses, and the new cache, is not."""
    sizes: Any = ({1: Dim("chunk", max=TOKENS)}, {0: Dim("rows", min=2, max=ROWS)})
    example = torch.zeros(HEADS, 7, 16), torch.zeros(13, WIDTH)
    exported = torch.export.export(Attention(), example, dynamic_shapes=sizes)
    plan: Any = SimpleNamespace()
    found = count_temporary_bytes(TracedProgram("prefill", exported, (), (), plan))
    assert found == 4 * HEADS * (2 * TOKENS * ROWS + 32 * ROWS)
