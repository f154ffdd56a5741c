"""A step as target tensorrt traces it: what it computes, what is a plugin in it, what it calls."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild import plugins
from mtpbuild.builder.compiler.temporary import VIEW, find_role
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.program.trace import TracedProgram, trace
from mtpbuild.builder.targets.inductor.in_place import update_in_place
from mtpbuild.builder.targets.tensorrt import TARGET
from mtpbuild.builder.targets.tensorrt.pipeline import TENSORRT
from tests.support.checkpoints import lower, make_predictable
from tests.support.gpu_steps import MANY, check_step, with_joined
from tests.support.steps import CHUNK
from tests.support.styles import style_of

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FUSED = (
    plugins.mla_queries,
    plugins.mla_rows,
    plugins.mla_values,
    plugins.moe_route,
    plugins.rotary_rows,
)
# Calls of a rank of eight of R1, nextn 3: what one more dense layer adds, what one more MoE layer,
# and a step of one of each. More are a step backwards.
OF_A_STEP = {"bfloat16": (14, 15, 178), "nvfp4": (16, 15, 180), "fp8": (16, 15, 180)}


def programs(slots: int) -> Iterator[tuple[TracedProgram, Any, Plan]]:
    """Yield prefill, decode and decode_mixed of a model with both kinds of layers."""
    reference = make_predictable(num_hidden_layers=2, num_nextn_predict_layers=1, **MANY)
    style = style_of("tensorrt", dtype="float32")
    plan = Plan(reference.config, 2, "mtp-eagle", slots, 40, CHUNK, style)
    for program in make_programs(plan, with_joined(reference)):
        yield trace(program, plan), reference, plan


@pytest.mark.full
@pytest.mark.usefixtures("traced_without_running")
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch's own, of copied graphs
@pytest.mark.parametrize("slots", [1, 3])
def test_it_is_the_step_without_plugins_between_products(slots: int) -> None:
    """Its tokens, caches and other state, by the ops' references, which the kernels equal."""
    torch.set_num_threads(1)
    _, (traced, reference, plan), _ = programs(slots)
    check_step(update_in_place(traced.exported, traced), lower(reference), plan, 4)


@pytest.mark.full
@pytest.mark.usefixtures("traced_without_running")
def test_what_is_a_plugin() -> None:
    """All ops of a step, with fixed sizes; in a prompt, whose chunk is open, none of these."""
    fused = {op._opoverload: op for op in FUSED}
    for traced, _, _ in programs(1):
        nodes = [node for node in traced.exported.graph.nodes if node.target in fused]
        assert {*nodes} == set() or traced.name != "prefill"
        assert {node.target for node in nodes} == (set() if traced.name == "prefill" else {*fused})
        for node in nodes:
            assert fused[node.target]._name in TENSORRT.facets
            given = [each.meta["val"] for each in node.all_input_nodes]
            assert all(isinstance(size, int) for value in given for size in value.shape)
        written = plugins.mla_rows_write._opoverload
        assert not [node for node in traced.exported.graph.nodes if node.target is written]


def count_calls_of_r1(format: str, dense: int, moe: int) -> int:
    """Count the calls of a step of R1's rank of eight with so many layers, but for collectives."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        random_model, slices = (import_module(f"on_gpu.{n}") for n in ("random_model", "slices"))
    finally:
        sys.path.remove(str(BENCHMARKS))
    case = slices.r1_share(8, (3,), *(() if format == "bfloat16" else (format,)))
    kinds = (False,) * dense + (True,) * (moe + 1)
    config = replace(case.config, num_hidden_layers=dense + moe, moe_layers=kinds)
    case = replace(case, config=config)
    style = TARGET.style
    plan = Plan(config, 3, "mtp-eagle", 1, 4096 + 256, 8, style, case.ranks, ("10.0",))
    traced = trace(make_programs(plan, random_model.empty_model(case, "cpu"))[1], plan)
    calls = [n for n in traced.exported.graph.nodes if n.op == "call_function"]
    return sum(find_role(n) != VIEW and not is_collective(n.target) for n in calls)


def is_collective(op: Any) -> bool:
    return op.namespace == "_c10d_functional" or op is plugins.sum_of_ranks._opoverload


@pytest.mark.full
@pytest.mark.parametrize("format", ["nvfp4", "bfloat16", "fp8"])
def test_calls_of_r1(format: str) -> None:
    one, dense, moe = (count_calls_of_r1(format, *n) for n in ((1, 1), (2, 1), (1, 2)))
    for calls, most in zip((dense - one, moe - one, one), OF_A_STEP[format], strict=True):
        assert calls <= most
