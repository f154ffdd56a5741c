"""Runs a step's graph for a GPU, as AOTInductor gets it, on a CPU beside the step without ops."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from mtpbuild.builder.graph.pipeline import TRACED_THROUGH
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.deepseek_v3.model import DeepseekV3
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.program.opened_model import make_model
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.program.trace import TracedProgram, trace
from mtpbuild.builder.targets.inductor import gpu_passes
from mtpbuild.builder.targets.inductor.in_place import update_in_place
from mtpbuild.builder.targets.inductor.pipeline import INDUCTOR_CUDA
from mtpbuild.builder.targets.passes import run_passes
from mtpbuild.builder.weights.table import choose_formats, make_family_table
from tests.support.checkpoints import lower, made_of, make_predictable
from tests.support.families import make_family
from tests.support.steps import CHUNK, begin
from tests.support.styles import style_of

ON_GPU = style_of("inductor", device="cuda")
MANY = {"n_routed_experts": 24, "num_experts_per_tok": 3, "first_k_dense_replace": 1}


def with_joined(reference: PlainDeepseek) -> DeepseekV3:
    """Make the program's model with shared experts in the stacks, through the weight table."""
    style = GraphStyle(for_gpu=True, pipeline=INDUCTOR_CUDA)
    table = choose_formats(make_family_table(reference.config), lambda stored: None, style)
    assert len(table.joined) == 2, "the layer with experts and the module"
    model, tensors = make_model(table, style, "cpu"), reference.state_dict()
    weights = {w.name: made_of(w, {s.name: tensors[s.name] for s in w.stored}) for w in table}
    model.load_state_dict(weights, assign=True)
    assert isinstance(model, DeepseekV3)
    return model.eval()


def with_kernels(traced: TracedProgram) -> ExportedProgram:
    """Return the program as a GPU gets it, with tensors on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_passes, "DEVICE", "cpu")
        passes = [p for p in INDUCTOR_CUDA.lowered_passes if p.module == gpu_passes.__name__]
        lowered: ExportedProgram = run_passes(passes, traced.exported, traced)
    return lowered


def graph_of(traced: TracedProgram) -> Any:
    """Return the graph for a GPU, which overwrites its state."""
    return update_in_place(with_kernels(traced), traced)


def check_step(
    graph: Any, model: CausalLM, plan: Plan, steps: int, idle: bool = True, rows: int = 5
) -> None:
    """Check tokens, caches and other state against the plain step; slot 1, if any, idles.

    idle: also compare the idle slot's results, which nobody reads. rows: committed at first.
    """
    plain = replace(plan, style=replace(plan.style, pipeline=TRACED_THROUGH))
    program = make_programs(plain, model)[1]
    state = begin(plan, rows)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    active = torch.arange(plan.max_batch) != 1
    some = active | idle
    with torch.no_grad():
        for _ in range(steps):
            outputs = graph(*pytree.tree_leaves((state, active)))
            expected, wanted = program.module(expected, active)
            for got, name in zip(outputs, program.results, strict=True):
                torch.testing.assert_close(got[some], wanted[name][some], rtol=1e-3, atol=1e-3)
            for name, got in state.items():
                torch.testing.assert_close(got[some], expected[name][some], rtol=1e-3, atol=1e-3)
            assert all(torch.equal(state[name], expected[name]) for name in ("lengths", "window"))
    assert (state["lengths"][active] >= rows + steps).all()
    assert (state["lengths"][~active] == rows).all()


def check_fused_step(slots: int) -> Any:
    """Check a step with all ops, of a model with both kinds of layers; return its graph."""
    reference = make_predictable(num_hidden_layers=2, num_nextn_predict_layers=1, **MANY)
    plan = Plan(reference.config, 2, "mtp-eagle", slots, 40, CHUNK, ON_GPU)
    graph = graph_of(trace(make_programs(plan, with_joined(reference))[1], plan))
    check_step(graph, lower(reference), plan, 4)
    return graph


def check_sparse_step(name: str, slots: int, nextn: int = 2) -> Any:
    """Check a step whose layers choose rows, of which there are four times as many."""
    reference = make_family(name)
    plan = Plan(reference.config, nextn, "mtp-eagle", slots, 60, CHUNK, ON_GPU)
    graph = graph_of(trace(make_programs(plan, lower(reference))[1], plan))
    check_step(graph, lower(reference), plan, 4, idle=False, rows=32)
    return graph
