"""A step whose norms, rotation, routing and products by head are ops of ours: still the same step.

Graphs for a CPU have none of these ops, and are those of the other tests.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtpbuild.builder.models.common.moe import GatheredMoE
from mtpbuild.builder.models.common.moe_weights import find_modules_like_routed
from mtpbuild.builder.models.common.weight import Share
from mtpbuild.builder.models.deepseek_v3.weights import weight_table
from mtpbuild.builder.plan.plan import DrafterName, Plan
from mtpbuild.builder.targets.inductor.gpu_passes import name_op
from mtpbuild.plugins import IN_PLACE
from mtpbuild.plugins.definition import keep
from mtpbuild.runtime.ranks import Ranks
from tests.support.checkpoints import SHAPES, lower, make_model, make_predictable
from tests.support.gpu_steps import MANY, ON_GPU, check_fused_step, check_sparse_step, with_joined
from tests.support.op_calls import OpCalls
from tests.support.steps import CHUNK, check_steps

FULL = pytest.mark.full


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "nextn", "drafter"),
    [
        ("yarn-three-modules", 2, "mtp-eagle"),
        pytest.param("yarn-three-modules", 2, "mtp-vanilla", marks=FULL),
        ("no-q-lora-one-module", 2, "mtp-eagle"),
        ("ragged-no-interleave", 2, "mtp-eagle"),
    ],
)
def test_every_step_equals_recomputation(
    shape: str, nextn: int, drafter: DrafterName | None
) -> None:
    """O3 and O6 on the ops' references; kernels equal them by tests/plugins."""
    calls = OpCalls(torch.ops.mtpbuild.mla_rows_write.default)

    reference = make_predictable(**SHAPES[shape])
    plan = Plan(reference.config, nextn, drafter, 1, 200, CHUNK, ON_GPU)
    with calls:
        check_steps(plan, lower(reference), reference)
    assert calls.seen


@torch.no_grad()
def test_a_shared_expert_among_the_routed() -> None:
    """The module computes the same, gathered or by its ops, for few tokens and for many."""
    reference = make_model(num_hidden_layers=2, num_nextn_predict_layers=1, **MANY)
    apart, joined = lower(reference), with_joined(reference)
    mine, other = apart.layers[1].mlp, joined.layers[1].mlp
    assert isinstance(mine, GatheredMoE)
    assert isinstance(other, GatheredMoE)
    assert mine.shared_experts is not None
    assert other.shared_experts is None
    for tokens in (3, 70):
        x = torch.randn(1, tokens, reference.config.hidden_size)
        wanted = mine(x)
        torch.testing.assert_close(other(x), wanted)
        with keep(()):
            torch.testing.assert_close(other(x), wanted)


def test_which_shared_experts_fit() -> None:
    """One of a routed expert's size, in each rank's share."""
    reference = make_model(num_hidden_layers=2, num_nextn_predict_layers=1, **MANY)
    cases: list[tuple[dict[str, Any], Ranks, int]] = [
        ({}, Ranks(2), 2),
        ({}, Ranks(2, ep=2), 0),  # a rank holds whole experts, and half of the shared one
        ({}, Ranks(2, attention_dp=True), 0),
        ({"n_shared_experts": 2}, Ranks(), 0),
        ({"n_shared_experts": 0}, Ranks(), 0),
        ({"n_routed_experts": 16}, Ranks(), 0),  # all of them are one MLP
    ]
    for changed, ranks, count in cases:
        share = Share(ranks)
        table = weight_table(replace(reference.config, **changed), share)
        assert len(find_modules_like_routed(table, share)) == count


@pytest.mark.full
@pytest.mark.usefixtures("traced_without_running")
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch's own, of copied graphs
@pytest.mark.parametrize("slots", [1, 3])
def test_what_a_gpu_is_given(slots: int) -> None:
    """The graph that AOTInductor gets, on the CPU by Triton's interpreter: state is written over.

    Its tokens, caches and other state are those of the step without any of the ops.
    """
    pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    torch.set_num_threads(1)
    graph = check_fused_step(slots)
    into = {name for name, _, _ in IN_PLACE.values()}
    called = [name_op(node) for node in graph.graph.nodes]
    assert sum(name in into for name in called) == 3, "both layers' caches and the module's"
    assert not any("kv_write" in name or "index_put" in name for name in called)


@pytest.mark.full
@pytest.mark.usefixtures("traced_without_running")
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch's own, of copied graphs
@pytest.mark.parametrize(
    ("family", "slots"),
    [
        ("glm-5", 1),
        pytest.param("glm-5", 3, marks=FULL),
        pytest.param("deepseek-v3.2", 3, marks=FULL),
    ],
)
def test_attention_to_chosen_rows(family: str, slots: int) -> None:
    """Every indexer's choice and every attention are kernels; a shared choice is made once."""
    pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    torch.set_num_threads(1)
    graph = check_sparse_step(family, slots)
    called = Counter(map(name_op, graph.graph.nodes))
    layers, own = (3, 2) if family == "glm-5" else (2, 2)
    drafts = 1 if family == "glm-5" else 2  # that choose for themselves
    assert called["mtpbuild_triton::choose_rows"] == own + drafts
    assert called["mtpbuild_triton::mla_attention"] == layers + 2
    left = {name for name in called if name.startswith("mtpbuild::")}
    assert left == set()
