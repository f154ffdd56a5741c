"""DeepSeek-V4 on GPUs that are not there: its texts, the graphs that AOTInductor gets, kernels."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.program.opened_model import make_model
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.program.trace import trace
from mtpbuild.builder.targets.inductor.gpu_passes import name_op
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.table import choose_formats, make_family_table
from mtpbuild.runtime import Engine
from mtpbuild.runtime.contract.programs import PrefixCaching
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.prefix_cache.cache import PrefixCache
from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms
from tests.support.checkpoints import made_of
from tests.support.deepseek_v4 import load_plain, save
from tests.support.eager_package import EagerPackage, manifest_of
from tests.support.fake_gpu import FakeGpu, opened
from tests.support.gpu_steps import check_step, graph_of
from tests.support.inductor_engines import GREEDY, prompts
from tests.support.opened import load_model
from tests.support.requests import build, build_request
from tests.support.steps import begin
from tests.support.styles import style_of

FULL = pytest.mark.full
triton = pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model")
    save(path)
    return path


def load(folder: Path, nextn: int, slots: int) -> tuple[CausalLM, Plan]:
    """Return the model as a GPU's engine holds it, with shared experts among the others."""
    style, config = style_of("inductor", device="cuda"), load_config(folder)
    table = choose_formats(make_family_table(config), lambda stored: None, style)
    assert len(table.joined) == 5
    model, checkpoint = make_model(table, style, "cpu"), open_checkpoint(folder)
    weights = {
        w.name: made_of(w, {s.name: checkpoint.read(s.name) for s in w.stored}) for w in table
    }
    model.load_state_dict(weights, assign=True)
    plan = Plan(config, nextn, "mtp-eagle" if nextn else None, slots, 200, 8, style)
    return model.eval(), plan


@pytest.mark.parametrize("nextn", [3, pytest.param(0, marks=FULL)])
def test_texts_equal_plain_decoding(nextn: int, folder: Path) -> None:
    """In a batch whose slots come free, and from rows of prompts that begin alike."""
    model, plan = load(folder, nextn, 2)
    programs = make_programs(plan, model)
    packages, manifest = {p.name: EagerPackage(p) for p in programs}, manifest_of(plan, programs)
    loaded = CudaPrograms(manifest, FakeGpu(ahead=True), opened(packages))  # type: ignore[arg-type]
    cache = PrefixCache(cast(PrefixCaching, loaded), manifest, 1 << 20)
    plain, settings = load_plain(folder), replace(GREEDY, max_tokens=6)
    asked = [[token % 60 for token in prompt] for prompt in prompts(70, 3)]
    with Engine(loaded, manifest, overlap=True, prefix_cache=cache) as engine:
        for cached in (0, 64):
            results = engine.generate(asked, settings)
            for prompt, result in zip(asked, results, strict=True):
                logits = plain.logits(plain.main(torch.tensor([[*prompt, *result.token_ids]])))
                assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == result.token_ids
            assert results[0].metrics.cached_tokens >= cached
            asked = [[*prompt, 7, 9] for prompt in asked]


@FULL
@pytest.mark.usefixtures("traced_without_running")
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch's own, of copied graphs
@pytest.mark.parametrize(("slots", "nextn"), [(1, 3), (3, 0)])
def test_the_graph_of_a_step(slots: int, nextn: int, folder: Path) -> None:
    """It is the step of PyTorch's operators; kernels attend, choose, route and mix."""
    model, plan = load(folder, nextn, slots)
    graph = graph_of(trace(make_programs(plan, model)[1], plan))
    check_step(graph, load_model(folder, plan.config), plan, 2, idle=False, rows=32)
    calls = Counter(map(name_op, graph.graph.nodes))
    passes = 4 + nextn
    assert calls["mtpbuild_triton::listed_attention"] == passes
    assert calls["mtpbuild_triton::listed_choice"] == 2
    assert calls["mtpbuild_triton::balance_streams"] == 2 * passes
    assert calls["mtpbuild_triton::moe"] == passes
    assert not calls["mtpbuild_triton::gated_product"], "shared experts are in the stacks"
    assert calls["mtpbuild_triton::root_route"] == passes - 1, "one layer's tokens choose"
    assert not [name for name in calls if name.startswith("mtpbuild::") or "cond" in name]
    values = [(n, v) for n in graph.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)]
    held = [v.shape for n, v in values if n.op == "placeholder" and v.dim() == 4]
    made = Counter(name_op(n) for n, v in values if n.op != "placeholder" and v.shape in held)
    caches = 4 + 2 * 3 + bool(nextn)
    assert len(held) == caches
    assert made["aten::index_put"] == caches
    assert set(made) <= {"aten::index_put", "aten::copy_"}, "no cache is copied"


@FULL
@pytest.mark.usefixtures("traced_without_running")
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch's own, of copied graphs
def test_the_graph_of_a_prompt(folder: Path) -> None:
    """Chunks of any size write what the program writes that was not lowered."""
    model, plan = load(folder, 3, 1)
    program = make_programs(plan, model)[0]
    traced = trace(program, plan)
    graph, state = graph_of(traced), begin(plan, 0)
    state = {name: state[name] for name in program.state}
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    start, rng = 0, np.random.default_rng(0)
    for size in (8, 1, 5, 8, 8):
        tokens = torch.from_numpy(rng.integers(0, 60, (1, size)))
        arguments = tokens, torch.tensor([start]), tokens[:, :1]
        with torch.no_grad():
            graph(*state.values(), *arguments)
            wanted = program.module(wanted, *arguments)
        start += size
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, wanted[name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
def test_other_targets_refuse(target: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="attention to compressed rows has no GPU kernel in target"
    ):
        build(build_request(folder, (0,), out=tmp_path, target=target))
