"""Models whose experts are too many to compute all: what is read of them, and that it is right."""

import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file

from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.models.common.blocks import ExpertRows
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest
from tests.reference.recompute import greedy
from tests.support.checkpoints import load_config, make_predictable, save_checkpoint
from tests.support.cpu_chains import apart
from tests.support.engines import EngineBuilder, greedy_ids
from tests.support.opened import load_model, opened
from tests.support.transformers_oracle import transformers_greedy, transformers_model

pytestmark = pytest.mark.xdist_group("many-experts")  # another worker would wait for the engines
EXPERTS, LAYERS, NEXTN = 32, 2, 2
MANY: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 1,
}
PROMPTS = [[5, 17, 3], [40], [9, 9, 33, 21, 60, 2, 7, 7, 1, 30, 12]]


@pytest.fixture(scope="module")
def model() -> PlainDeepseek:
    torch.set_num_threads(1)
    return make_predictable(**MANY)


@pytest.fixture(scope="module")
def folder(model: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("many") / "many", model, **MANY)


@pytest.fixture(scope="module", params=["portable", "own"])
def engine(request: pytest.FixtureRequest, folder: Path, build_engine: EngineBuilder) -> Path:
    portable = request.param == "portable"
    return build_engine(folder, NEXTN, "mtp-eagle", prefill_chunk=4, portable=portable)


@pytest.mark.full
def test_tokens(engine: Path, model: PlainDeepseek, folder: Path) -> None:
    """Whole chunks and parts of one; what is accepted was drafted by a module with experts too."""
    theirs = transformers_model(folder)
    wanted = [greedy(model, prompt, 30) for prompt in PROMPTS]
    assert wanted[0] == transformers_greedy(theirs, PROMPTS[0], 30)
    assert greedy_ids(engine, PROMPTS, 30) == wanted


@pytest.mark.full
@pytest.mark.parametrize("program", ["prefill", "decode", "decode_mixed"])
def test_no_program_copies_an_experts_weights(engine: Path, program: str) -> None:
    """One node of each layer reads them, whatever the tokens: nothing gathers them for a token."""
    graph = onnx.load(engine / f"{program}.onnx", load_external_data=False).graph
    portable = read_manifest(engine).build.cpu_layout is None
    axes, node_type = (3, "MoE") if portable else (4, "Experts")
    weights = {i.name for i in graph.initializer if len(i.dims) == axes and i.dims[0] == EXPERTS}
    apart(graph)
    readers = [node for node in graph.node if weights & set(node.input)]
    assert {node.op_type for node in readers} == {node_type}
    read = [name for node in readers for name in node.input if name in weights]
    # Prompts leave out the module's experts: they need its cache alone. A step drafts twice.
    trunk, drafts = LAYERS, 0 if program == "prefill" else NEXTN
    assert set(read) == weights
    assert len(weights) == 2 * (trunk + bool(drafts))
    assert len(read) == 2 * (trunk + drafts)


@pytest.mark.full
def test_the_weights_are_stored_once(engine: Path) -> None:
    stored = load_file(engine / WEIGHTS)
    manifest = read_manifest(engine)
    part, both, down = "rows", [EXPERTS, 2 * 16, 32], [EXPERTS, 32, 16]
    if manifest.build.cpu_layout is not None:  # 16 gates are half a panel, which is filled up
        part, both, down = "values", [EXPERTS, 2, 32, 32], [EXPERTS, 1, 16, 32]
    for leaf, shape in (("gate_up_proj", both), ("down_proj", down)):
        found = [tensor for name, tensor in stored.items() if name.endswith(f"mlp.{leaf}.{part}")]
        assert [[*tensor.shape] for tensor in found] == [shape] * (LAYERS + 1)
    numbers = sum(tensor.numel() for tensor in stored.values())
    assert (numbers == manifest.model.parameters) == (part == "rows")


def test_both_layouts_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    """Experts compute the same by outputs, for a CPU, and by inputs, for a GPU."""
    config = load_config(folder)
    source = opened(folder, config)
    EngineWeights(source).write(tmp_path, siblings=None)
    source.model.load_state_dict(load_file(tmp_path / WEIGHTS), assign=True)
    by_inputs = load_model(folder, config)
    kinds = [isinstance(module, ExpertRows) for module in source.model.modules()]
    assert sum(kinds) == 2 * (LAYERS + 1)
    x = torch.randn(3, 5, config.hidden_size)
    for name in (f"layers.{i}.mlp" for i in range(LAYERS)):
        ours, theirs = (model.get_submodule(name)(x) for model in (source.model, by_inputs))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_new_weights(engine: Path, tmp_path: Path) -> None:
    other = make_predictable(1, **MANY)
    refitted = shutil.copytree(engine, tmp_path / "engine")
    refit(refitted, str(save_checkpoint(tmp_path / "other", other, **MANY)))
    wanted = [greedy(other, prompt, 20) for prompt in PROMPTS]
    assert greedy_ids(refitted, PROMPTS, 20) == wanted
