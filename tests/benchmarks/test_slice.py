"""The slice of R1 that `benchmarks/gpu.py` measures: what a rank holds, what its parts cost."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mtpbuild.plugins.matmul_scaled.op import dequantise
from mtpbuild.runtime.errors import UsageError
from tests.support.scripts import BENCHMARKS, benchmark

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
CONTEXT, BF16, FP32 = 4096, 2, 4
LOWER = f"""
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch._inductor import compile_fx
from torch.utils import _pytree as pytree
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

sys.path.insert(0, {str(BENCHMARKS)!r})
from on_gpu import machine, r1, slice_bench, slices
from mtpbuild.builder.targets.inductor.pipeline import INDUCTOR_CUDA
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.program.trace import trace
from tests.support.gpu_steps import graph_of

class Pretended:  # a GPU, for what is asked while tracing
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

class Seen(Exception):
    pass

def see(module, inputs, **settings):
    nodes = module.graph.nodes
    written = [n.kwargs["tensors_to_clone"] for n in nodes if "triton_kernel" in str(n.target)]
    print(name, *sorted(" ".join(names) for names in written), sep="; ")
    raise Seen

driver.set_active(Pretended())
torch.set_num_threads(1)
case = replace(slices.small((0, 2)), dtype="bfloat16")
bench = slice_bench.Bench(case, machine.Machine("cpu"), True, Path("none"))
gpu = dict(for_gpu=True, whole_caches=True, pipeline=INDUCTOR_CUDA, overlap=True)
style = replace(bench.plan(2).style, **gpu)
plan = replace(bench.plan(2), style=style)
programs = [(part.name, part.program) for part in r1.needed(bench)]
for name, program in [*programs[4:], ("step", make_programs(plan, bench.model)[1])]:
    traced = trace(program, plan)
    graph = graph_of(traced)
    examples = tuple(pytree.tree_leaves(graph.meta["exported"].example_inputs))
    try:
        compile_fx.compile_fx_aot(graph, examples, inner_compile=see)
    except Seen:
        pass
"""


def on_gpu(name: str) -> ModuleType:
    return benchmark(f"on_gpu.{name}")


@pytest.fixture
def section() -> ModuleType:
    return on_gpu("r1")


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    torch.manual_seed(0)
    case, machine = on_gpu("slices").small((0, 2, 3)), on_gpu("machine").Machine("cpu")
    return on_gpu("slice_bench").Bench(case, machine, False, tmp_path)


@pytest.mark.parametrize("nextn", [0, 2, 3])
def test_the_parts_make_up_a_step(
    nextn: int, section: ModuleType, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert section.composition_error(bench, nextn) < 1e-4
    monkeypatch.setattr(section.Head, "forward", without_norm)
    assert section.composition_error(bench, nextn) > 0.1, "a part that is left out shows"


@pytest.mark.parametrize(("weights", "module"), [("nvfp4", False), ("fp8", True)])
def test_weights_of_a_published_checkpoint(
    weights: str, module: bool, section: ModuleType, tmp_path: Path
) -> None:
    """Experts and MLPs stay in its format, as in an engine, and the parts make up a step."""
    case = replace(on_gpu("slices").small((2,)), weights=weights)
    kept = on_gpu("random_model").table_of(case).formats.keys()
    assert {f"layers.{i}.mlp.{p}" for i in (0, 1) for p in ("gate_up_proj", "down_proj")} <= kept
    assert ("mtp.0.mlp.down_proj" in kept) == module
    bench = on_gpu("slice_bench").Bench(case, on_gpu("machine").Machine("cpu"), False, tmp_path)
    assert section.composition_error(bench, 2) < 1e-4
    inside = bench.model.layers[1].mlp.down_proj
    wide = dequantise(*inside.parts)[:1]
    assert wide.shape == (1, 16, 48)
    assert 0.5 < float(wide.square().mean()) * 16 < 2, "a product keeps its input's scale"


def without_norm(self: Any, state: Any, x: torch.Tensor) -> tuple[Any, Any]:
    return {}, {"hidden": x, "logits": self.model.logits(x, on_gpu("parts").own)}


def test_drafts_are_compared(
    section: ModuleType, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shuffled(model: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, drafts = whole(model, *rest)
        return logprobs, drafts + 1

    whole = section.from_parts
    monkeypatch.setattr(section, "from_parts", shuffled)
    assert section.composition_error(bench, 3) == 3


def test_every_counted_part_is_timed(section: ModuleType, bench: Any) -> None:
    timed = {(part.name, part.tokens) for part in section.needed(bench)}
    counted = [section.counts(bench.case, nextn) for nextn in bench.case.nextn]
    assert set().union(*counted) == timed
    each = {"dense layer": 3, "MoE layer": 58, "head": 1, "acceptance": 1}
    assert counted[0] == {(name, 1): count for name, count in each.items()}
    assert counted[2]["further draft", 1] == 2
    assert counted[2]["head of a draft", 1] == 3


def test_a_step_is_the_sum_of_its_parts(section: ModuleType, bench: Any) -> None:
    Row = on_gpu("machine").Row
    bench.machine = replace(bench.machine, bandwidth=1.0)
    found = {
        (part.name, part.tokens): Row(part.name, "", 0.0, 2.0, 1.0)
        for part in section.needed(bench)
    }
    row = section.whole_step(bench, 2, found)
    assert (row.microseconds, row.bound) == (2.0 * 67, 67.0)


def test_what_a_rank_of_eight_holds_and_reads() -> None:
    """Bytes by hand, at R1's widths; nothing is allocated."""
    case, module = on_gpu("slices").r1_share(8, (0, 3)), on_gpu("parts")
    parts = module.Parts(on_gpu("random_model").random_model(case, "meta"), CONTEXT)
    E, experts = 7168, 256
    attention = E * (1536 + 576) + 1536 * 16 * 192 + 16 * 256 * 512 + 16 * 128 * E
    norms = 2 * E + 1536 + 512
    cache = BF16 * CONTEXT * 576
    expert = 3 * E * 256
    router = FP32 * (E * experts + experts)

    dense = parts.layer("dense layer", 0, 1).cost
    assert dense.nbytes == BF16 * (attention + norms + 3 * E * 2304) + cache
    one = parts.layer("MoE layer", 1, 1).cost
    shared = BF16 * (attention + norms + expert) + router + cache
    assert one.nbytes == pytest.approx(shared + 8 * BF16 * expert)
    four = parts.layer("MoE layer", 1, 4).cost
    chosen = experts * (1 - (1 - 8 / experts) ** 4)
    assert four.nbytes == pytest.approx(shared + chosen * BF16 * expert)
    scores = 2 * 16 * CONTEXT * (576 + 512)
    used = attention + norms + 9 * expert + (E + 1) * experts
    assert one.operations == pytest.approx(2 * used + scores)

    draft = parts.further_draft(torch.empty(1, 1, CONTEXT, 576, device="meta")).cost
    own = BF16 * (2 * E * E // 8 + 3 * E)  # its part of eh_proj, and three norms
    assert draft.nbytes == pytest.approx(one.nbytes + own)
    assert parts.head(4).cost.nbytes == BF16 * E * 16160
    assert parts.acceptance(4).cost.nbytes == FP32 * 4 * 16160


@pytest.mark.full
def test_what_a_gpus_compiler_is_given(tmp_path: Path) -> None:
    """Each part has its kernels, and the step has the kernels of its parts."""
    compiling = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    compiling |= {"TRITON_CACHE_DIR": str(tmp_path), "TORCH_LOGS": "-all"}
    command = [sys.executable, "-W", "ignore", "-c", LOWER]
    done = subprocess.run(command, env=compiling, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {name: kernels for name, *kernels in (x.split("; ") for x in done.stdout.splitlines())}
    rotary, head = "cos sin base place first", ["parts"]
    attention = ["out", "out", "out", "out lse", "parts"]
    writing, drafting = ["cache q fresh"], ["q fresh"]  # a further draft's row is written elsewhere
    dense, experts = ["inner", "parts"], ["inner parts", "parts", "parts", "sums", "weights ids"]
    expert_layer = sorted([*attention, *writing, *experts, rotary])
    judging = ["best", "tokens num_tokens new_lengths logprobs margins"]
    assert found == {
        "dense layer": sorted([*attention, *writing, *dense, rotary]),
        "MoE layer": expert_layer, "head": head, "acceptance": judging,
        "first draft": expert_layer, "head of a draft": ["best", *head],
        "further draft": sorted([*attention, *drafting, *experts, rotary]),
        "step": sorted(
            attention * 4 + writing * 3 + drafting + dense + experts * 3 + head * 3 + judging
            + ["best"] * 2 + [rotary] * 2  # layers of one window share a table
        ),
    }  # fmt: skip


def test_what_is_refused() -> None:
    slices = on_gpu("slices")
    r1_share, check_memory = slices.r1_share, slices.check_memory
    with pytest.raises(UsageError, match="--tp 3") as caught:
        r1_share(3, (0,))
    assert "\n" not in str(caught.value)
    check_memory(r1_share(8, (0, 3)), free=80 * 10**9)
    with pytest.raises(UsageError, match=r"needs 1\d\d GB of GPU memory, 80 GB are free") as caught:
        check_memory(r1_share(1, (0, 3)), free=80 * 10**9)
