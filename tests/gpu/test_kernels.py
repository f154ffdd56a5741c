"""The contracts of tests/plugins on a GPU, and the shapes that only a GPU has the time for."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from mtpbuild.plugins import accept_rewind, kv_write, mla_attention, moe
from mtpbuild.plugins.launch import AOT_SHARED, Launch
from mtpbuild.runtime.contract.sums import BYTES
from mtpbuild.runtime.group.nccl import release
from tests.support import kernels, sparse_kernels, step_kernels
from tests.support.gpu_driver import drive
from tests.support.kernel_launches import Shape, launches
from tests.support.kernels import Attention, Experts
from tests.support.sparse_kernels import Choice, Chosen
from tests.support.step_kernels import Latents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# Each example compiles a shape; 60 of them take more than two minutes.
RANDOM = settings(deadline=None, derandomize=True, max_examples=24, database=None)
VOCAB = 129280


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    yield
    torch.set_float32_matmul_precision(before)


@RANDOM
@given(case=kernels.attentions())
def test_mla_attention(case: Attention) -> None:
    kernels.check_attention(case, "cuda")


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("shared", [AOT_SHARED, 160 << 10])
def test_attention_to_chosen_rows(tokens: int, shared: int) -> None:
    """DeepSeek-V3.2's sizes, a rank of eight."""
    for dtype in (torch.float32, torch.bfloat16):
        case = Chosen(2, 16, tokens, tokens, 512, 64, 6000, 2048, dtype, None, shared)
        sparse_kernels.check_chosen(case, "cuda")
    sparse_kernels.check_idle("cuda")


@pytest.mark.parametrize("rows", [1500, 40_000])
def test_choice_of_rows(rows: int) -> None:
    """Sums of small integers are exact, as 64 is a square, and many of them tie."""
    for dtype in (torch.float32, torch.bfloat16):
        case = Choice(2, 4, rows, 4, 2048, 3, True, dtype, (64, 64, 32))
        sparse_kernels.check_choice(case, "cuda")
    sparse_kernels.check_nan("cuda")


@pytest.mark.parametrize("shared", [AOT_SHARED, 160 << 10, None])
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("heads", [16, 128])
def test_deepseeks_attention(heads: int, tokens: int, shared: int) -> None:
    kernels.check_attention(
        Attention(3, heads, tokens, tokens, 512, 64, 3000, torch.bfloat16, None, shared, 64, 1),
        "cuda",
    )


@pytest.mark.parametrize("seed", range(4))
def test_kv_write(seed: int) -> None:
    kernels.check_kv_write(seed, "cuda", width=576)


@pytest.mark.parametrize(("vocab", "drafts"), [(2, 1), (1000, 3), (VOCAB, 3), (160000, 15)])
def test_greedy_acceptance(vocab: int, drafts: int) -> None:
    kernels.check_greedy(vocab, vocab, drafts, "cuda")


@pytest.mark.parametrize("seed", range(30))
def test_mixed_acceptance(seed: int) -> None:
    case = kernels.random_mixed(seed, 50 + 400 * seed, seed % 5)
    kernels.check_mixed(case, "cuda")
    kernels.check_flags(case, "cuda")
    case.asked["banned_until"].zero_()
    kernels.check_filters(case, "cuda")


@pytest.mark.parametrize("seed", range(8))
def test_laws(seed: int) -> None:
    kernels.check_shaped_probs(seed, 50 + 4000 * seed, 1 + seed % 3, "cuda")


@RANDOM
@given(case=kernels.products())
def test_matmul_scaled(case: kernels.Product) -> None:
    kernels.check_product(case, "cuda")


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_experts(form: str, dtype: torch.dtype) -> None:
    kernels.check_scaled_moe(0, (form, form), dtype, "cuda")
    kernels.check_scaled_moe(1, (form, form), dtype, "cuda", tokens=33)


def test_logits_of_a_narrow_head_do_not_tie() -> None:
    kernels.check_wide_product(0, "cuda")


@RANDOM
@given(case=kernels.expert_choices())
def test_moe(case: Experts) -> None:
    kernels.check_moe(case, "cuda")


@RANDOM
@given(case=step_kernels.latents())
def test_latents(case: Latents) -> None:
    step_kernels.check_latents(case, "cuda")


@pytest.mark.parametrize("tokens", [1, 4])
def test_deepseeks_latents(tokens: int) -> None:
    case = Latents(2, tokens, 16, 128, 64, 512, 128, 1536, True, torch.bfloat16, tokens)
    step_kernels.check_latents(case, "cuda")


@pytest.mark.parametrize("seed", range(12))
def test_places(seed: int) -> None:
    step_kernels.check_places(seed, "cuda")
    step_kernels.check_shared_routes(seed, "cuda")


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_gated_products(rows: int) -> None:
    step_kernels.check_gated(rows, rows, 7168, 2304, "cuda")


def test_deepseeks_experts() -> None:
    """A rank's share of 8: 32 of 256 experts, here as 32 in 8 groups."""
    for tokens in (1, 8, 64):
        kernels.check_moe(Experts(tokens, 32, 8, 4, 8, 7168, 2048, 10.0, torch.bfloat16, 1), "cuda")


def test_ops_pick_their_kernels() -> None:
    """The same call on CUDA tensors runs Triton, and gives the reference's results."""
    torch.manual_seed(0)
    B, T, S = 2, 3, 50
    q, cache, fresh = torch.randn(B, 4, T, 24), torch.randn(B, 1, S, 24), torch.randn(B, 1, T, 24)
    base, zeros = torch.tensor([0, 40]), torch.zeros(2, dtype=torch.int64)
    logits, window = torch.randn(B, T, 99), torch.zeros(B, T, dtype=torch.int64)
    ids = torch.tensor([[0, 2], [2, 1]], dtype=torch.int32)

    def calls(device: str) -> list[Tensor]:
        def on(*tensors: Tensor) -> Sequence[Tensor]:
            return [tensor.to(device) for tensor in tensors]

        generator = torch.Generator().manual_seed(1)
        experts = [torch.randn(*s, generator=generator) for s in ((2, 9), (3, 9, 8), (3, 4, 9))]
        return [
            mla_attention(*on(q, cache, fresh, base, zeros), 0.2, 16),
            kv_write(*on(cache, fresh, base)),
            *accept_rewind(*on(logits, window, zeros, base, zeros == 0)),
            moe(*on(experts[0], torch.ones(2, 2), ids, *experts[1:])),
        ]

    for got, wanted in zip(calls("cuda"), calls("cpu"), strict=True):
        assert got.is_cuda
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-5)


DEVICE_SHAPES = {
    "bf16": Shape(2, 3, 16, 64, 16, 1000, 48, 32, 8, 4, 2, 2, torch.bfloat16),
    "fp32": Shape(2, 3, 4, 40, 8, 1000, 48, 32, 8, 4, 2, 2, torch.float32),
}


@pytest.mark.parametrize("name", DEVICE_SHAPES)
@pytest.mark.parametrize("portable", [True, False])
def test_the_driver_launches_the_ptx(name: str, portable: bool) -> None:
    """Every kernel, with TensorRT's argument list: what PyTorch's launch writes, it writes too."""
    major, minor = torch.cuda.get_device_capability()
    architecture = 80 if portable else 10 * major + minor
    torch.manual_seed(0)
    for launch in launches(DEVICE_SHAPES[name]):
        launch = filled(launch)
        launch.run()
        wanted = [tensor.clone() for tensor in launch.outputs]
        for tensor in launch.outputs:
            tensor.zero_()
        drive(launch, architecture)
        for got, expected in zip(launch.outputs, wanted, strict=True):
            # Code for another architecture may sum in another order: a bfloat16 differs in a bit.
            near = 1e-5 if got.dtype == torch.float32 else 1.6e-2
            torch.testing.assert_close(got, expected, rtol=near, atol=1e-5, equal_nan=True)


def filled(launch: Launch) -> Launch:
    """Make its meta tensors real: small integers, floats in [0, 1), zeroed outputs."""

    def operand(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if tensor.is_floating_point():
            return torch.rand(tensor.shape, device="cuda").to(tensor.dtype)
        return torch.randint(0, 2, tensor.shape, device="cuda").to(tensor.dtype)

    return replace(
        launch,
        inputs=tuple(map(operand, launch.inputs)),
        outputs=tuple(torch.zeros_like(tensor, device="cuda") for tensor in launch.outputs),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 7168), (3, 1001)])
def test_one_shot_sums_on_one_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Two streams are two ranks; launched, and captured and replayed with other values."""
    from mtpbuild.plugins.sum_of_ranks.triton import sum_of_ranks_launches

    memories = [torch.zeros(BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    at = [memory.data_ptr() for memory in memories]
    given = [torch.randn(shape, device="cuda").to(dtype) for _ in at]
    told = [torch.tensor([*at, rank], device="cuda") for rank in range(2)]
    made = [sum_of_ranks_launches(*each) for each in zip(given, told, strict=True)]
    streams = [torch.cuda.Stream() for _ in at]
    graphs = [torch.cuda.CUDAGraph() for _ in at]
    torch.cuda.synchronize()

    def both(work: Callable[[int], object]) -> None:
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                work(rank)
        end = time.monotonic() + 30
        while not all(stream.query() for stream in streams):
            if time.monotonic() > end:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for memory in memories:
                        release(memory)
                pytest.fail("a rank waits for the other one")
        wanted = given[0].float() + given[1].float()
        assert all(torch.equal(launch.results, wanted.to(dtype)) for launch in made)

    both(lambda rank: made[rank].run())
    for graph, stream, launch in zip(graphs, streams, made, strict=True):
        with torch.cuda.graph(graph, stream=stream):
            launch.run()
    for _ in range(100):
        for x in given:
            x.normal_()
        torch.cuda.synchronize()
        both(lambda rank: graphs[rank].replay())
