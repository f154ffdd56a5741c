"""AOTInductor is given for a GPU: our kernels, caches written in place, nothing to branch on.

Traced with a GPU pretended and the tensors on the CPU, up to where code would be generated; in a
process of its own, because Triton's interpreter must be off.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
pytestmark = pytest.mark.xdist_group("gpu_graph")  # one worker traces for all

NEXTN, LAYERS, MODULES = 1, 1, 1
MANY = {"first_k_dense_replace": 0, "n_routed_experts": 24, "num_experts_per_tok": 3}
TRACE = f"""
import json
import sys

import torch
from torch._inductor import compile_fx
from torch.utils import _pytree as pytree
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mtpbuild.builder.models.common.blocks import ScaledWeight, replace_parameter
from mtpbuild.builder.models.common.precision import FLOATS, set_dtype
from mtpbuild.builder.models.common.weight import Share
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.targets.inductor import Inductor
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.targets.inductor.lowering import _pretend_group
from mtpbuild.builder.targets.inductor.one_shot import sum_through_shared_memory
from mtpbuild.builder.program.trace import trace
from mtpbuild.runtime.ranks import Ranks
from tests.support.checkpoints import lower, make_model
from tests.support.families import CHOOSERS, make_family
from tests.support.gpu_steps import graph_of
from tests.support.styles import style_of

class Pretended:  # a GPU, for what is asked while tracing
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

class Seen(Exception):
    pass

def see(module, inputs, **settings):
    for node in module.graph.nodes:
        written = node.kwargs.get("tensors_to_clone")
        shape = node.meta["val"].shape if hasattr(node.meta.get("val"), "shape") else ()
        dtype = str(getattr(node.meta.get("val"), "dtype", ""))
        size = [str(size) for size in shape]
        print(json.dumps([case, node.op, str(node.target), written, size, dtype]))
    raise Seen

driver.set_active(Pretended())
torch.set_num_threads(1)
CASES = (
    ("batch", 4, "float32", {{}}),
    ("many", 4, "bfloat16", {MANY}),
    ("one", 1, "bfloat16", {MANY}),
    ("fp8", 1, "bfloat16", {MANY}),
    ("fp8-batch", 4, "float32", {{}}),
    ("ranks", 4, "float32", {{"vocab_size": 64}}),
    ("ranks-bf16", 1, "bfloat16", {{"vocab_size": 64}} | {MANY}),
    ("ranks-dp", 1, "bfloat16", {MANY}),
    ("deepseek-v3.2", 1, "bfloat16", {{}}),
    ("glm-5", 1, "bfloat16", {{}}),
    ("glm-5-batch", 4, "float32", {{}}),
    ("ranks-one-shot", 4, "bfloat16", {{"vocab_size": 64}} | {MANY}),
)
for case, slots, dtype, experts in CASES:
    if case not in sys.argv:
        continue
    sizes = {{"num_hidden_layers": {LAYERS}, "num_nextn_predict_layers": {MODULES}}} | experts
    family, nextn = case.removesuffix("-batch"), {NEXTN}
    if family in CHOOSERS:
        model, nextn = make_family(family), 2
    else:
        model = make_model(**sizes)
    tp = 2 if "ranks" in case else 1
    style, ranks = style_of("inductor", device="cuda", dtype=dtype), Ranks(tp, tp, "dp" in case)
    own = style, ranks, ("9.0",)
    plan = Plan(model.config, nextn, "mtp-eagle", slots, 200, 4, *own)
    lowered = lower(model, Share(ranks, tp - 1))
    set_dtype(lowered, FLOATS[dtype], for_gpu=True)
    for name, weight in list(lowered.named_parameters()):
        if "fp8" in case and ".mlp." in name and name.endswith(("_up_proj", "down_proj")):
            replace_parameter(lowered, name, ScaledWeight(tuple(weight.shape), 16))
    decode = make_programs(plan, lowered)[1]
    traced = trace(decode, plan)
    if "one-shot" in case:
        sum_through_shared_memory(traced.exported, traced)
    graph = graph_of(traced)
    examples = tuple(pytree.tree_leaves(graph.meta["exported"].example_inputs))
    try:
        with _pretend_group(tp):
            compile_fx.compile_fx_aot(graph, examples, inner_compile=see)
    except Seen:
        pass
"""


Node = tuple[str, str, Any, list[str], str]


Graphs = dict[str, list[Node]]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    """List each graph's nodes: kind, callee, what a kernel writes, shape and type of the result."""
    return traced(tmp_path_factory.mktemp("triton"), "batch", "one")


@pytest.fixture(scope="module")
def all_graphs(graphs: Graphs, tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    own = "many", "fp8", "fp8-batch", "ranks", "ranks-bf16", "ranks-dp", "ranks-one-shot"
    return graphs | traced(tmp_path_factory.mktemp("triton"), *own)


def traced(cache: Path, *cases: str) -> Graphs:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        "TORCH_LOGS": "-all",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-W", "ignore", "-c", TRACE, *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Graphs = {}
    for line in done.stdout.splitlines():
        case, *node = json.loads(line)
        found.setdefault(case, []).append((*node,))
    return found


def kernels(nodes: list[Node]) -> list[list[str]]:
    """List what each kernel writes."""
    return sorted(names for _, target, names, *_ in nodes if "triton_kernel" in target)


PASSES = LAYERS + NEXTN  # of a step, through a layer or the module
ACCEPTANCE = [["best"], ["tokens", "num_tokens", "new_lengths", "logprobs", "margins"]]
# What every pass has around its attention, and what only places of tokens ask for.
AROUND = [
    *[["cache", "q", "fresh"]] * (LAYERS + MODULES),
    *[["q", "fresh"]] * (NEXTN - 1),  # further drafts leave no rows
    *[["out"]] * (2 * PASSES),  # queries and values by head
    *[["parts"]] * (2 * PASSES),  # the first products, and the queries'
    *[["cos", "sin", "base", "place", "first"]] * NEXTN,  # the window, and each further draft
]


@pytest.mark.full
def test_the_graph_of_a_step(graphs: Graphs) -> None:
    nodes = graphs["batch"]
    calls = Counter(target for _, target, *_ in nodes)
    routes = [["parts"], ["weights", "ids"]] * NEXTN  # the layer has no experts
    assert kernels(nodes) == sorted(AROUND + ACCEPTANCE + [["out", "lse"]] * PASSES + routes)
    assert not any("mtpbuild" in target or "cond" in target for target in calls)

    caches = [shape for kind, *_, shape, _ in nodes if kind == "placeholder" and len(shape) == 4]
    assert len(caches) == LAYERS + MODULES
    assert all(shape[0].startswith("s") for shape in caches), "the number of slots is open"
    assert all(shape[2] == "256" for shape in caches), "the capacity is not"
    made = Counter(
        target
        for kind, target, _, shape, _ in nodes
        if shape == caches[0] and kind != "placeholder"
    )
    written = {"<built-in function getitem>": len(caches)}
    assert made == written, "by a kernel, and the copy back makes it in place"
    changed = ("lengths", "window", "num_drafts")
    assert calls["aten.copy_.default"] == len(caches) + len(changed)


@pytest.mark.full
def test_a_rank_of_two(all_graphs: Graphs) -> None:
    """A sum behind each attention, feed-forward, embedding, projection of a draft, and head."""
    nodes = all_graphs["ranks"]
    calls = Counter(target for _, target, *_ in nodes)
    passes, heads = LAYERS + NEXTN, 1 + NEXTN
    sums = 2 * passes + 2 * heads + NEXTN
    assert calls["_c10d_functional.all_reduce.default"] == sums
    assert calls["_c10d_functional.wait_tensor.default"] == sums
    drafts = [["best"]] * NEXTN  # ranks exchange their best logits
    assert kernels(nodes) == sorted(kernels(all_graphs["batch"]) + drafts)
    gathered = [shape for _, target, _, shape, _ in nodes if "all_reduce" in target][-1]
    assert gathered[-1] == str(2 * 5), "a block of each rank"
    assert not any("mtpbuild" in target or "cond" in target for target in calls)


@pytest.mark.full
def test_a_rank_of_two_in_bfloat16(all_graphs: Graphs) -> None:
    """Sums are narrow but for the heads', where logits would tie; the kernels are the same."""
    nodes = all_graphs["ranks-bf16"]
    passes, heads = LAYERS + NEXTN, 1 + NEXTN
    sums = Counter(dtype for _, target, *_, dtype in nodes if "all_reduce" in target)
    assert sums == {"torch.bfloat16": 2 * passes + heads + NEXTN, "torch.float32": heads}
    assert kernels(nodes) == sorted(kernels(all_graphs["one"]) + [["best"]] * NEXTN)


@pytest.mark.full
def test_attention_dp_of_two(all_graphs: Graphs) -> None:
    """Two sums behind the experts of each pass, and no others."""
    nodes = all_graphs["ranks-dp"]
    sums = [shape for _, target, _, shape, _ in nodes if "all_reduce" in target]
    assert len(sums) == 2 * (LAYERS + NEXTN)
    assert all(shape[0] == "2" for shape in sums), "of both ranks' tokens"
    assert kernels(nodes) == kernels(all_graphs["one"])


@pytest.mark.full
def test_one_shot_sums_of_a_rank_of_two(all_graphs: Graphs) -> None:
    """Each is a kernel of ours that writes its result alone, and nothing calls NCCL."""
    nodes = all_graphs["ranks-one-shot"]
    calls = Counter(target for _, target, *_ in nodes)
    assert not any("_c10d" in target for target in calls)
    sums = 2 * (LAYERS + NEXTN) + 2 * (1 + NEXTN) + NEXTN
    values = 2 * PASSES  # of each head, and its queries
    assert kernels(nodes).count(["out"]) == values + sums
    written = {name for names in kernels(nodes) for name in names}
    assert not written & {"x", "peers"}, "AOTInductor would copy them first"


@pytest.mark.full
def test_one_request_in_bfloat16(graphs: Graphs) -> None:
    """Experts are kernels too; caches and what goes to the experts stay narrow."""
    nodes = graphs["one"]
    attention = [["out", "lse"], ["out"]] * PASSES
    routes = [["parts"], ["weights", "ids"]] * PASSES
    experts = [["sums"], ["inner", "parts"], ["inner"]] * PASSES  # and shared
    heads = [["parts"]] * (1 + NEXTN)
    assert kernels(nodes) == sorted(AROUND + ACCEPTANCE + attention + routes + experts + heads)
    given = {(*shape,): dtype for kind, *_, shape, dtype in nodes if kind == "placeholder"}
    assert given["1", "1", "256", "20"] == "torch.bfloat16"
    wide = [shape for *_, shape, dtype in nodes if dtype == "torch.float32" and len(shape) == 4]
    assert not [shape for shape in wide if shape[2] == "256"], "no cache is widened"


CHOICES = {"deepseek-v3.2": (2, 2), "glm-5": (3, 2), "glm-5-batch": (3, 2)}  # layers, indexers


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return traced(tmp_path_factory.mktemp("triton"), *CHOICES)


@pytest.mark.full
@pytest.mark.parametrize("case", CHOICES)
def test_attention_to_chosen_rows(case: str, choices: Graphs) -> None:
    """A choice is two kernels, which write nothing else; the module chooses for itself.

    Later drafts choose where they do not share the first one's choice, and every index key is
    written with its row, where that is.
    """
    nodes, (layers, indexers) = choices[case], CHOICES[case]
    written = kernels(nodes)
    chosen = indexers + (1 if "glm" in case else 2)
    assert written.count(["scores"]) == written.count(["chosen"]) == chosen
    assert written.count(["out", "lse"]) == layers + 2, "two drafts"
    assert not any("mtpbuild" in target or "cond" in target for _, target, *_ in nodes)
    rows = [shape for kind, *_, shape, _ in nodes if kind == "placeholder" and len(shape) == 4]
    assert [shape[3] for shape in rows].count("28") == indexers + 1, "latents, and keys behind them"
    assert len(rows) == layers + 1
    made = Counter(
        target for kind, target, _, shape, _ in nodes if shape in rows and kind[0] == "c"
    )
    keyless = {"<built-in function getitem>": layers - indexers} if layers > indexers else {}
    assert made == {"aten.index_put.default": indexers + 1} | keyless, "each is written in place"


@pytest.mark.full
def test_experts_of_an_open_number_of_slots(all_graphs: Graphs) -> None:
    """The kernels are called once in a pass, for as many tokens as there are."""
    nodes = all_graphs["many"]
    assert kernels(nodes).count(["sums"]) == kernels(nodes).count(["inner", "parts"]) == PASSES
    assert [shape for *_, shape, _ in nodes if "3*" in "".join(shape)], "three tokens of each slot"


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "wide", "gated"), [("fp8", "one", PASSES), ("fp8-batch", "batch", 0)]
)
def test_fp8_is_dequantised_in_the_kernels(
    case: str, wide: str, gated: int, all_graphs: Graphs
) -> None:
    """The kernels are those with wide weights, and both products of each MLP.

    gated: products of the former that are one kernel with what joins gates and ups.
    """
    nodes, own = all_graphs[case], kernels(all_graphs[wide])
    for _ in range(gated):
        own.remove(["inner"])
    assert kernels(nodes) == sorted(own + [["parts"]] * 2 * PASSES)
    stored = [shape for kind, *_, shape, dtype in nodes if dtype == "torch.uint8"]
    assert stored
    made = [shape for kind, *_, shape, dtype in nodes if kind == "call_function" and "fl" in dtype]
    assert not [shape for shape in stored if shape in made], "no weight is made in memory"
