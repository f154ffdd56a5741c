"""What AOTInductor is given for a GPU: our kernels, caches written in place, nothing to branch on.

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

NEXTN, LAYERS, MODULES = 2, 1, 1
TRACE = f"""
import json
from dataclasses import replace

import torch
from torch._inductor import compile_fx
from torch.utils import _pytree as pytree
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mtpbuild.builder.plan import Plan
from mtpbuild.builder.program import make_programs
from mtpbuild.builder.targets.gpu_graph import for_gpu
from mtpbuild.builder.targets.inductor import in_place
from mtpbuild.builder.trace import trace
from tests.checkpoints import lower, make_model

class Pretended:  # a GPU, for what is asked while tracing
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

class Seen(Exception):
    pass

def see(module, inputs, **settings):
    for node in module.graph.nodes:
        written = node.kwargs.get("tensors_to_clone")
        shape = node.meta["val"].shape if hasattr(node.meta.get("val"), "shape") else ()
        print(json.dumps([node.op, str(node.target), written, [str(size) for size in shape]]))
    raise Seen

driver.set_active(Pretended())
torch.set_num_threads(1)
model = make_model(
    num_hidden_layers={LAYERS}, first_k_dense_replace=1, num_nextn_predict_layers={MODULES}
)
plan = Plan(model.config, {NEXTN}, "mtp-eagle", 4, 200, 4, gpu="9.0")
decode = make_programs(plan, lower(model))[1]
traced = trace(decode, plan)
traced = replace(traced, exported=for_gpu(traced.exported, "cpu"))
examples = tuple(pytree.tree_leaves(traced.exported.example_inputs))
try:
    compile_fx.compile_fx_aot(in_place(traced), examples, inner_compile=see)
except Seen:
    pass
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, Any, list[str]]]:
    """Of the graph: kind, what is called, what a kernel writes, shape of the result."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "TORCH_LOGS": "-all",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-W", "ignore", "-c", TRACE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_the_graph_of_a_step(nodes: list[tuple[str, str, Any, list[str]]]) -> None:
    calls = Counter(target for _, target, _, _ in nodes)
    written = [names for _, target, names, _ in nodes if "triton_kernel" in target]
    passes = LAYERS + NEXTN  # one attention each
    assert sorted(written) == sorted(
        [["out", "lse"]] * passes
        + [["best", "ids"], ["tokens", "num_tokens", "new_lengths", "logprobs", "margins"]]
    )
    assert not any("mtpbuild" in target or "cond" in target for target in calls)

    caches = [shape for kind, _, _, shape in nodes if kind == "placeholder" and len(shape) == 4]
    assert len(caches) == LAYERS + MODULES
    assert all(shape[0].startswith("s") for shape in caches), "the number of slots is open"
    assert all(shape[2] == "256" for shape in caches), "the capacity is not"
    made = Counter(
        target for kind, target, _, shape in nodes if shape == caches[0] and kind != "placeholder"
    )
    assert made == {"aten.index_put.default": len(caches)}, "and the copy back makes it in place"
    changed = ("lengths", "window", "num_drafts")
    assert calls["aten.copy_.default"] == len(caches) + len(changed)
