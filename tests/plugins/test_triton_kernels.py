"""Oracle O8: each Triton kernel, run by the interpreter, equals its PyTorch reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpbuild.builder.checkpoint.config import RopeConfig
from mtpbuild.builder.models.common.moe import GatheredMoE
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.plugins import mla_attention, moe, moe_route
from mtpbuild.plugins.definition import keep
from mtpbuild.plugins.moe.op import NO_EXPERT
from mtpbuild.runtime.ranks import ALONE, Ranks
from mtpbuild.runtime.sampling.params import COLDEST
from tests.support import kernels
from tests.support.acceptance_cases import (
    BANNED,
    BLOCK,
    REJECTION,
    RELAXED,
    SAMPLED,
    SYNTHETIC,
    operands,
)
from tests.support.kernels import Attention, Experts, Mixed, Product
from tests.support.op_calls import OpCalls

triton = pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU runs these contracts in tests/gpu", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("bfloat16_products")
FEW = settings(deadline=None, derandomize=True, max_examples=8, database=None)
MANY = settings(deadline=None, derandomize=True, max_examples=300, database=None)
SEEDS = st.integers(0, 1 << 20)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small vocabularies have many blocks, the last of them cut off."""
    from mtpbuild.plugins.accept_rewind import op

    monkeypatch.setattr(op, "BLOCK", 32)


@FEW
@given(case=kernels.attentions())
def test_mla_attention(case: Attention) -> None:
    kernels.check_attention(case, "cpu")


@pytest.mark.full
@MANY
@given(case=kernels.attentions())
def test_mla_attention_in_full(case: Attention) -> None:
    kernels.check_attention(case, "cpu")


@pytest.mark.parametrize("splits", [None, 1])
@pytest.mark.parametrize(("heads", "tokens"), [(8, 12), (130, 2)])
def test_many_query_rows(
    heads: int, tokens: int, splits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 64 query rows, the last of which is not full, as a Hopper GPU has them."""
    from mtpbuild.plugins.mla_attention import triton as kernel

    monkeypatch.setattr(kernel, "is_hopper", lambda device: True)
    case = (3, heads, tokens, tokens + 1, 24, 16, 150, torch.bfloat16, splits, 1 << 20, 64, 5)
    kernels.check_attention(Attention(*case), "cpu")


@pytest.mark.parametrize("seed", range(4))
def test_kv_write(seed: int) -> None:
    kernels.check_kv_write(seed, "cpu")


@pytest.mark.usefixtures("small_blocks")
def test_greedy_acceptance() -> None:
    shapes = [(2, 1), (7, 3), (32, 0), (33, 2), (150, 5)]
    seen = {kernels.check_greedy(i, *shape, "cpu") - shape[1] for i, shape in enumerate(shapes)}
    assert 1 in seen  # somewhere all drafts are kept


@pytest.mark.full
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which interprets
def test_what_is_no_number_ends_in_its_own_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter's own refuses NaN alone, of which a GPU takes any.
    monkeypatch.setattr(np, "nanargmax", np.argmax)
    kernels.check_rows_of_nan(70, "cpu")
    kernels.check_routes_of_nan("cpu")


@pytest.mark.full
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_the_table_of_modes(drafts: int) -> None:
    """All cases of `test_modes` with so many drafts, as one batch."""
    tables = (RELAXED, REJECTION, SAMPLED, BLOCK, SYNTHETIC, BANNED)
    cases = [case for table in tables for case in table.values() if len(case.drafts) == drafts]
    assert len(cases) > 2
    given = [operands(case) for case in cases]
    batch = Mixed(*(join(column) for column in zip(*given, strict=True)))
    tokens = kernels.check_mixed(batch, "cpu")
    emitted = [row[row >= 0].tolist() for row in tokens]
    assert emitted == [case.emitted for case in cases]


def join(values: tuple[Any, ...]) -> Any:
    """Return operands of single slots as one batch, mappings name by name."""
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values)
    return {name: torch.cat([value[name] for value in values]) for name in values[0]}


@pytest.mark.full
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("seed", "vocab", "drafts"),
    [(0, 40, 3), (1, 33, 1), pytest.param(2, 70, 2, marks=pytest.mark.full)],
)
def test_mixed_acceptance(seed: int, vocab: int, drafts: int) -> None:
    kernels.check_mixed(kernels.random_mixed(seed, vocab, drafts), "cpu")


@pytest.mark.full
@pytest.mark.usefixtures("small_blocks")
def test_filters_without_a_sort() -> None:
    case = kernels.random_mixed(7, 70, 1, slots=8)
    case.asked["banned_until"].zero_()
    kernels.check_filters(case, "cpu")


@pytest.mark.full
@pytest.mark.usefixtures("small_blocks")
def test_flags_as_numbers() -> None:
    kernels.check_flags(kernels.random_mixed(3, 33, 1), "cpu")


@pytest.mark.full
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("vocab", "tokens"), [(70, 1), (33, 3)])
def test_laws_without_a_sort(vocab: int, tokens: int) -> None:
    kernels.check_shaped_probs(vocab, vocab, tokens, "cpu")
    kernels.check_shaped_probs(vocab, vocab, tokens, "cpu", COLDEST)


@pytest.mark.full
@MANY
@given(seed=SEEDS, vocab=st.integers(12, 99), drafts=st.integers(0, 4))
def test_mixed_acceptance_in_full(seed: int, vocab: int, drafts: int) -> None:
    kernels.check_mixed(kernels.random_mixed(seed, vocab, drafts), "cpu")


@pytest.mark.full
@FEW
@given(case=kernels.expert_choices())
def test_moe(case: Experts) -> None:
    kernels.check_moe(case, "cpu")


@pytest.mark.full
@settings(parent=MANY, max_examples=60)
@given(case=kernels.expert_choices())
def test_moe_in_full(case: Experts) -> None:
    kernels.check_moe(case, "cpu")


@pytest.mark.full
@settings(parent=FEW, max_examples=20)
@given(case=kernels.products())
def test_matmul_scaled(case: Product) -> None:
    kernels.check_product(case, "cpu")


@pytest.mark.full
@pytest.mark.parametrize("forms", [("fp8", "fp8"), ("nvfp4", "nvfp4"), ("nvfp4", "plain")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_experts(forms: tuple[str, str], dtype: torch.dtype) -> None:
    kernels.check_scaled_moe(0, forms, dtype, "cpu")


def test_an_expert_of_more_tokens_than_a_block() -> None:
    kernels.check_scaled_moe(1, ("fp8", "nvfp4"), torch.bfloat16, "cpu", tokens=17)


@pytest.mark.full
def test_logits_of_a_narrow_head_do_not_tie() -> None:
    kernels.check_wide_product(0, "cpu")


@pytest.mark.parametrize(
    ("slots", "splits", "held", "used"),
    [
        pytest.param(1, 128, 700, 30, marks=pytest.mark.full),
        (1, 128, 47, 2),
        pytest.param(1, 4, 700, 4, marks=pytest.mark.full),
        pytest.param(7, 4, 300, 2, marks=pytest.mark.full),
    ],
)
def test_splits_by_what_a_slot_holds(
    slots: int, splits: int, held: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many splits there may be, partial sums are written for those that have rows.

    Seven slots share a GPU of which a tenth is there, as 70 slots share a whole one.
    """
    from mtpbuild.plugins.mla_attention import triton as kernel
    from mtpbuild.plugins.mla_attention.triton import mla_attention_launches

    if slots > 1:
        monkeypatch.setattr(kernel, "MULTIPROCESSORS", 13)
    g = torch.Generator().manual_seed(1)
    q, cache = torch.randn(slots, 1, 1, 6, generator=g), torch.randn(slots, 1, 999, 6, generator=g)
    base = torch.full((slots,), held)
    operands = (q, cache, cache[:, :, :1].contiguous(), base, torch.zeros_like(base), 0.2, 4)
    launches = mla_attention_launches(*operands, splits=splits)
    torch.testing.assert_close(launches.run(), mla_attention(*operands))
    partial, sums = launches.each[0].outputs
    assert partial.shape[1] == splits
    (filled,) = set(torch.isfinite(sums[:, :, 0]).sum(1).tolist())
    last = used < splits  # that one has the fresh rows, if no others
    assert used / 2 <= filled - last <= used  # of whole tiles


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("fp8", torch.float32),
        pytest.param("fp8", torch.bfloat16, marks=pytest.mark.full),
        pytest.param("nvfp4", torch.bfloat16, marks=pytest.mark.full),
    ],
)
def test_splits_of_the_inputs(form: str, dtype: torch.dtype) -> None:
    """A weight this deep has several programs per column block; a row's sum is its own.

    Sums are those of exact values, with rows in bf16 too.
    """
    from mtpbuild.plugins.matmul_scaled.op import dequantise
    from mtpbuild.plugins.matmul_scaled.triton import product_launch

    g = torch.Generator().manual_seed(1)
    x = torch.randn(20, 1600, generator=g).to(dtype)
    weight = kernels.random_scaled(g, form, 1600, 20)
    sums = []
    for rows in (x, x[1:2]):
        launch = product_launch(rows.contiguous(), *weight)
        assert launch.grid == (1, 3, -(-len(rows) // 16))
        launch.run()
        sums.append(launch.outputs[0].sum(0))
    wanted = x.double() @ dequantise(*weight).double()
    torch.testing.assert_close(sums[0].double(), wanted, rtol=1e-5, atol=1e-3)
    assert torch.equal(sums[0][1:2], sums[1])


def test_the_experts_are_the_models() -> None:
    """The references of both ops are GatheredMoE without its shared experts."""
    torch.manual_seed(0)
    config = tiny_experts()
    model = GatheredMoE(config, ALONE)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    x = torch.randn(7, config.hidden_size)
    c = config
    weights, ids = moe_route(
        x @ model.gate.weight,
        model.gate.e_score_correction_bias,
        c.n_group,
        c.topk_group,
        c.num_experts_per_tok,
        c.norm_topk_prob,
        c.routed_scaling_factor,
    )
    y = moe(x, weights, ids, model.gate_up_proj, model.down_proj)
    assert model.shared_experts is not None
    torch.testing.assert_close(y + model.shared_experts(x), model(x))


def test_many_tokens_go_in_pieces() -> None:
    """Many tokens, of a step or of a chunk of open size, give what each would give alone."""
    torch.manual_seed(0)
    model = GatheredMoE(tiny_experts(), ALONE)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    x = torch.randn(1, 300, 12)
    with keep(()):
        wanted = model(x)
    for most, padded, calls in ((150, True, 3), (256, False, 1), (300, False, 2)):
        sizes = {1: torch.export.Dim("tokens", min=1, max=most)}
        with keep(("moe",), padded_tokens=64 if padded else None):
            torch.testing.assert_close(model(x), wanted)
            opened = torch.export.export(model, (x[:, :7],), dynamic_shapes=(sizes,))
        found = [n for n in opened.graph.nodes if n.target is torch.ops.mtpbuild.moe.default]
        assert len(found) == calls
        rows = found[0].args[0].meta["val"].shape[0]  # an open number, unless it is padded
        assert isinstance(rows, int) == (padded or calls > 1)
        for tokens in (1, 64, 65, most):
            part = x[:, :tokens]
            torch.testing.assert_close(opened.module()(part), wanted[:, :tokens])


@pytest.mark.parametrize("tokens", [7, 260])
def test_experts_of_two_ranks(tokens: int) -> None:
    """Each sums its own experts; the other's are nobody to its kernels."""
    torch.manual_seed(0)
    config = replace(tiny_experts(), n_routed_experts=24, topk_group=4)
    whole = GatheredMoE(config, ALONE)
    for parameter in whole.parameters():
        parameter.normal_(std=0.3)
    x = torch.randn(1, tokens, 12)
    total, calls = torch.zeros_like(x), OpCalls(torch.ops.mtpbuild.moe.default)
    for rank in range(2):
        part = GatheredMoE(config, Ranks(2, ep=2))
        part.gate, part.rank = whole.gate, torch.nn.Parameter(torch.tensor([rank]), False)
        for name in ("gate_up_proj", "down_proj"):
            setattr(part, name, torch.nn.Parameter(getattr(whole, name)[12 * rank :][:12], False))
        with keep(()):
            plain = part.routed(x)
        with calls:
            torch.testing.assert_close(part.routed(x), plain)
        total += plain
    torch.testing.assert_close(total, whole.routed(x))
    assert len(calls.seen) == 2 * -(-tokens // 256)
    for _, _, ids, *_ in calls.seen:
        assert (ids == NO_EXPERT).any()
        assert int(ids.max()) < 12
        for row in ids.tolist():
            own = [i for i in row if i != NO_EXPERT]
            assert len(own) == len(set(own))


def tiny_experts() -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=8,
        hidden_size=12,
        intermediate_size=8,
        moe_intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=1,
        q_lora_rank=None,
        kv_lora_rank=4,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
        n_routed_experts=12,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        moe_layers=(True,),
        num_nextn_predict_layers=0,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        rope_interleave=True,
        tie_word_embeddings=False,
        rope=RopeConfig(),
    )


def test_more_tokens_than_the_experts_kernel_takes() -> None:
    from mtpbuild.plugins.moe.triton import moe_triton

    x, weights, ids = (
        torch.zeros(257, n, dtype=t) for n, t in ((4, None), (1, None), (1, torch.int32))
    )
    with pytest.raises(NotImplementedError, match="256 tokens, not 257"):
        moe_triton(x, weights, ids, torch.zeros(2, 4, 8), torch.zeros(2, 4, 4))
