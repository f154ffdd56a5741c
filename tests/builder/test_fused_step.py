"""A step whose norms, rotation, routing and products by head are ops of ours: still the same step.

Graphs for a CPU have none of these ops, and are those of the other tests.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from mtpbuild.builder.model_source import join_shared
from mtpbuild.builder.models.common.moe import GatheredMoE
from mtpbuild.builder.models.common.weights import Share, like_routed, with_shared
from mtpbuild.builder.models.deepseek_v3.model import DeepseekV3
from mtpbuild.builder.models.deepseek_v3.reference import Transformer
from mtpbuild.builder.models.deepseek_v3.weights import weight_table
from mtpbuild.builder.plan import DrafterName, Plan
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.program.trace import trace
from mtpbuild.builder.targets.lower_inductor import in_place
from mtpbuild.builder.targets.passes.gpu_graph import for_gpu, op_name
from mtpbuild.plugins import IN_PLACE
from mtpbuild.runtime.ranks import Ranks
from tests.reference.eager import EagerPrograms
from tests.support.checkpoints import SHAPES, lower, made_of, make_model, make_predictable
from tests.support.op_calls import OpCalls
from tests.support.steps import CHUNK, begin, check_steps
from tests.support.styles import style_of

ON_GPU = style_of("inductor", device="cuda")
MANY = {"n_routed_experts": 24, "num_experts_per_tok": 3, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    ("shape", "nextn", "drafter"),
    [
        ("yarn-three-modules", 2, "mtp-eagle"),
        ("yarn-three-modules", 2, "mtp-vanilla"),
        ("no-q-lora-one-module", 2, "mtp-eagle"),
        ("ragged-no-interleave", 2, "mtp-eagle"),
    ],
)
def test_every_step_equals_recomputation(
    shape: str, nextn: int, drafter: DrafterName | None
) -> None:
    """O3 and O6 on the ops' references; kernels equal them by tests/plugins."""
    calls = OpCalls(torch.ops.mtpbuild.mla_rows_write.default)

    def make() -> tuple[EagerPrograms, Transformer]:
        reference = make_predictable(**SHAPES[shape])
        plan = Plan(reference.config, nextn, drafter, 1, 200, CHUNK, ON_GPU)
        return EagerPrograms(plan, lower(reference)), reference

    with calls:
        check_steps(make, nextn, drafter)
    assert calls.seen


def with_joined(reference: Transformer) -> DeepseekV3:
    """The program's model with its shared experts in the stacks, through the table of weights."""
    table = weight_table(reference.config, Share())
    modules = like_routed(table, Share())
    assert len(modules) == 2, "the layer with experts and the module"
    model, tensors = lower(reference), reference.state_dict()
    join_shared(model, modules)
    weights = {
        w.name: made_of(w, {s.name: tensors[s.name] for s in w.sources})
        for w in with_shared(table, modules)
    }
    model.load_state_dict(weights, assign=True)
    return model


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
        other.kernels = other.gate.fused = False
        torch.testing.assert_close(other(x), wanted)
        other.kernels = other.gate.fused = True
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
        assert len(like_routed(table, share)) == count


@torch.no_grad()
@pytest.mark.usefixtures("traced_without_running")
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch's own, of copied graphs
@pytest.mark.parametrize("slots", [1, pytest.param(3, marks=pytest.mark.full)])
def test_what_a_gpu_is_given(slots: int) -> None:
    """The graph that AOTInductor gets, on the CPU by Triton's interpreter: state is written over.

    Its tokens, caches and other state are those of the step without any of the ops.
    """
    pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    torch.set_num_threads(1)
    reference = make_predictable(num_hidden_layers=2, num_nextn_predict_layers=1, **MANY)
    plan = Plan(reference.config, 2, "mtp-eagle", slots, 40, CHUNK, ON_GPU)
    plain = replace(plan, style=replace(ON_GPU, fused=False, all_kernels=False))
    program = make_programs(plan, with_joined(reference))[1]
    traced = trace(program, plan)
    graph = in_place(replace(traced, exported=for_gpu(traced.exported, "cpu")))
    into = {name for name, _, _ in IN_PLACE.values()}
    called = [op_name(node) for node in graph.graph.nodes]
    assert sum(name in into for name in called) == 3, "both layers' caches and the module's"
    assert not any("kv_write" in name or "index_put" in name for name in called)

    steps = make_programs(plain, lower(reference))[1]
    state = begin(plan)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    active = torch.arange(slots) != 1
    for _ in range(4):
        outputs = graph(*pytree.tree_leaves((state, active)))
        expected, wanted = steps.module(expected, active)
        for got, name in zip(outputs, program.results, strict=True):
            torch.testing.assert_close(got, wanted[name], rtol=1e-3, atol=1e-3)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-3)
    assert (state["lengths"][active] > 8).all()
    assert (state["lengths"][~active] == 5).all()
