"""Oracle O8 for what stands between a step's products, in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings

from mtpbuild.plugins import gated_product, mla_rows
from tests.support import step_kernels
from tests.support.step_kernels import Latents

triton = pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU runs these contracts in tests/gpu", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("bfloat16_products")
FEW = settings(deadline=None, derandomize=True, max_examples=6, database=None)
MANY = settings(deadline=None, derandomize=True, max_examples=200, database=None)


@pytest.mark.full
@FEW
@given(case=step_kernels.latents())
def test_latents(case: Latents) -> None:
    step_kernels.check_latents(case, "cpu")


@pytest.mark.full
@MANY
@given(case=step_kernels.latents())
def test_latents_in_full(case: Latents) -> None:
    step_kernels.check_latents(case, "cpu")


@pytest.mark.parametrize("seed", range(12))
def test_places(seed: int) -> None:
    step_kernels.check_places(seed, "cpu")


@pytest.mark.parametrize("seed", range(4))
def test_shared_experts_are_chosen(seed: int) -> None:
    step_kernels.check_shared_routes(seed, "cpu")


@pytest.mark.parametrize(("rows", "hidden", "inner"), [(1, 8, 4), (5, 70, 66), (64, 130, 20)])
def test_gated_products(rows: int, hidden: int, inner: int) -> None:
    step_kernels.check_gated(rows, rows, hidden, inner, "cpu")


def test_more_tokens_than_a_gated_product_takes() -> None:
    from mtpbuild.plugins.gated_product.triton import gated_product_triton

    with pytest.raises(NotImplementedError, match="up to 64 tokens, not 65"):
        gated_product_triton(torch.zeros(65, 8), torch.zeros(8, 4))
    assert gated_product(torch.zeros(65, 8), torch.zeros(8, 4)).shape == (65, 2)


def test_rows_are_normed_and_rotated_by_hand() -> None:
    """One token whose numbers a reader can follow."""
    a = torch.tensor([[[3.0, 4.0, 1.0, 1.0, 5.0, 7.0]]])  # two of the queries, a latent, a key
    cos, sin = torch.tensor([[[0.0]]]), torch.tensor([[[1.0]]])  # a quarter turn
    q, fresh = mla_rows(a, torch.ones(2), torch.tensor([2.0, 1.0]), cos, sin, 0.0, True)
    torch.testing.assert_close(q, torch.tensor([[[3.0, 4.0]]]) / 12.5**0.5)
    torch.testing.assert_close(fresh, torch.tensor([[[[2.0, 1.0, -7.0, 5.0]]]]))
