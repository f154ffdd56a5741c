"""Oracle O8 for AOTInductor: each facet of its own equals the reference, on ragged lengths."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mtpbuild.plugins import (
    delta_rule,
    grouped_attention,
    kv_write,
    mla_attention,
)
from mtpbuild.plugins.delta_rule.inductor import delta_rule_inductor
from mtpbuild.plugins.grouped_attention.inductor import grouped_attention_inductor
from mtpbuild.plugins.mla_attention.inductor import mla_attention_inductor
from mtpbuild.plugins.mla_attention.op import FLOOR

GARBAGE = 1e20  # weighs 1e-32 (`floored_softmax`)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("slots", "heads", "tokens", "fresh"), [(1, 4, 3, 3), (3, 2, 1, 2)])
def test_attention(seed: int, slots: int, heads: int, tokens: int, fresh: int) -> None:
    torch.manual_seed(seed)
    rank, width, rows = 5, 8, 11
    base = torch.randint(0, rows + 1, (slots,))
    cache = torch.randn(slots, 1, rows, width)
    cache[torch.arange(rows) >= base[:, None, None]] = GARBAGE
    given = (
        torch.randn(slots, heads, tokens, width),
        cache,
        torch.randn(slots, 1, fresh, width),
        base,
        torch.randint(0, fresh - tokens + 1, (slots,)),
    )
    got = mla_attention_inductor(*given, 0.3, rank)
    torch.testing.assert_close(got, mla_attention(*given, 0.3, rank))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("slots", "heads", "groups", "tokens"), [(1, 4, 2, 3), (3, 6, 1, 1), (2, 3, 3, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_attention(
    seed: int, slots: int, heads: int, groups: int, tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    width, rows, fresh = 4, 11, tokens + 1
    base = torch.randint(0, rows + 1, (slots,))
    cache = torch.randn(slots, 1, rows, 2 * groups * width)
    cache[torch.arange(rows) >= base[:, None, None]] = GARBAGE
    given = (
        torch.randn(slots, heads, tokens, width, dtype=dtype),
        cache.to(dtype),
        torch.randn(slots, 1, fresh, 2 * groups * width, dtype=dtype),
        base,
        torch.randint(0, fresh - tokens + 1, (slots,)),
    )
    got, wanted = grouped_attention_inductor(*given, 0.3, groups), by_heads(*given, 0.3, groups)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), wanted, atol=tolerance, rtol=tolerance)
    reference = grouped_attention(*given, 0.3, groups)
    torch.testing.assert_close(reference.float(), wanted, atol=tolerance, rtol=tolerance)


def by_heads(
    q: Tensor, cache: Tensor, fresh: Tensor, base: Tensor, first: Tensor, scale: float, groups: int
) -> Tensor:
    """Each head and query by itself, over the rows that it sees."""
    out, (B, H, T, D) = torch.zeros(q.shape), q.shape
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        rows = [cache[b, 0, : int(base[b])], fresh[b, 0, : int(first[b]) + t + 1]]
        keys, values = torch.cat(rows).float().chunk(2, -1)
        own = slice(h // (H // groups) * D, h // (H // groups) * D + D)
        p = (keys[:, own] @ q[b, h, t].float() * scale).softmax(0)
        out[b, h, t] = p @ values[:, own]
    return out


SOON = {"aot_inductor.compile_wrapper_opt_level": "O0"}


class Rule(nn.Module):
    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        return delta_rule_inductor(*given)


@pytest.mark.full
@pytest.mark.xdist_group("inductor")
@pytest.mark.filterwarnings("ignore")  # what torch says of itself while it compiles
def test_delta_rule_over_a_prompt(tmp_path: Path) -> None:
    """Compiled, with as many heads of keys as of values: torch's loop keeps its operands."""
    slots, heads, width = 2, 3, 6

    def given(tokens: int) -> tuple[Tensor, ...]:
        mixed = torch.randn(slots, tokens, 3 * heads * width)
        rest = torch.randn(slots, tokens, 2 * heads), torch.rand(heads), torch.randn(heads)
        return mixed, *rest, torch.randn(slots, heads, width, width)

    torch.manual_seed(0)
    tokens = {1: torch.export.Dim("tokens", min=2, max=64)}
    dims = ((tokens, tokens, None, None, None),)
    program = torch.export.export(Rule(), given(7), dynamic_shapes=dims, strict=False)
    path = str(tmp_path / "rule.pt2")
    compiled = torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=SOON)
    )
    for count in (2, 5, 40):
        operands = given(count)
        for got, wanted in zip(compiled(*operands), delta_rule(*operands), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_attention_has_a_floor() -> None:
    """A row that should weigh e^-200 weighs `FLOOR`: seen by a value of 1 / FLOOR in it."""
    q, fresh = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[0.0, 0.0]]]])
    cache = torch.tensor([[[[-200.0, 1 / FLOOR]]]])
    zero = torch.zeros(1, dtype=torch.int64)
    got = mla_attention_inductor(q, cache, fresh, zero + 1, zero, 1.0, 2)
    assert got[..., 1].item() == pytest.approx(1.0, rel=1e-3)
    assert mla_attention(q, cache, fresh, zero + 1, zero, 1.0, 2)[..., 1].item() == 0


@pytest.mark.parametrize("tokens", [1, 4])
def test_write(tokens: int) -> None:
    cache, rows = torch.randn(3, 1, 9, 5), torch.randn(3, 1, tokens, 5)
    start = torch.tensor([0, 5, 9 - tokens])
    at = (start[:, None] + torch.arange(tokens))[:, None, :, None].expand(rows.shape)
    assert torch.equal(kv_write(cache, rows, start), cache.scatter(2, at, rows))
