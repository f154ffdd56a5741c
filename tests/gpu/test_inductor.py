"""Target inductor on a GPU: tokens of the plain model and onnxruntime, in place, refusals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import DrafterName
from mtpbuild.builder.targets.capability import GPUS, architecture
from mtpbuild.lab.measure.runs import run_prompts
from mtpbuild.runtime import Engine, EngineError, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.gpu.torch_cuda import Gpu
from mtpbuild.runtime.programs.aot_package import open_packages
from mtpbuild.runtime.programs.inductor import load as load_inductor
from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms, load
from mtpbuild.runtime.text.tokenizer import load_tokenizer
from tests.support.bfloat16 import check, check_logprobs, rounded
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.engines import EngineBuilder
from tests.support.inductor_engines import CHUNK, ENGINES, GREEDY, HOT, check_texts, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TEXTS = ["def fibonacci(n):", "class Stack:", "import os\n"]


@pytest.fixture(scope="module")
def model() -> PlainDeepseek:
    return make_predictable()


@pytest.fixture(scope="module")
def checkpoint(model: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("gpu") / "gpu", model)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("nextn", "drafter"), ENGINES)
def test_texts_equal_plain_decoding(
    nextn: int,
    drafter: DrafterName | None,
    slots: int,
    checkpoint: Path,
    model: PlainDeepseek,
    build_engine: EngineBuilder,
) -> None:
    flags = {"target": "inductor", "device": "cuda", "prefill_chunk": CHUNK, "max_batch": slots}
    check_texts(build_engine(checkpoint, nextn, drafter, **flags), model)


def test_compiled_without_asking_the_gpu(
    checkpoint: Path, model: PlainDeepseek, build_engine: EngineBuilder
) -> None:
    """What is built for a GPU that need not be here runs on the one that is."""
    if (capability := Gpu().compute_capability) not in GPUS:
        pytest.skip(f"no engine is compiled for {capability} elsewhere")
    name = f"sm{architecture(capability)}"
    flags = {"target": "inductor", "device": "cuda", "compute_capability": name}
    check_texts(build_engine(checkpoint, 3, "mtp-eagle", prefill_chunk=CHUNK, **flags), model)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "seed": 3}])
@pytest.mark.parametrize(("nextn", "batch"), [(0, 1), (3, 1), (3, 3)])
def test_the_same_tokens_as_onnxruntime(
    nextn: int, batch: int, settings: dict[str, float], build_engine: EngineBuilder
) -> None:
    """The tokens are the same with graphs and without, overlapping and not."""
    pytest.importorskip("onnxruntime")
    asked = SamplingParams(max_tokens=64, **settings)  # type: ignore[arg-type]
    with Engine.load(build_engine("deepseek-tiny", nextn, max_batch=batch)) as engine:
        wanted = [result.token_ids for result in engine.generate(TEXTS, asked)]
    flags = {"target": "inductor", "device": "cuda", "max_batch": batch}
    folder = build_engine("deepseek-tiny", nextn, **flags)
    manifest = read_manifest(folder)
    for graphs, overlap in ((True, True), (True, False), (False, True)):
        programs = CudaPrograms(manifest, Gpu(), open_packages(folder, manifest), graphs=graphs)
        tokenizer = load_tokenizer(folder, manifest)
        with Engine(programs, manifest, tokenizer, overlap=overlap) as engine:
            got = [result.token_ids for result in engine.generate(TEXTS, asked)]
        assert got == wanted, (graphs, overlap)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("nextn", "drafter"), ENGINES)
def test_bfloat16(
    nextn: int, drafter: DrafterName | None, slots: int, build_engine: EngineBuilder, tmp_path: Path
) -> None:
    """Many experts: with one slot they are a kernel."""
    shape = {"n_routed_experts": 24, "num_experts_per_tok": 3}
    exact = rounded(make_predictable(**shape))
    folder = save_checkpoint(tmp_path / "exact", exact, **shape)
    flags = {"target": "inductor", "device": "cuda", "prefill_chunk": CHUNK, "max_batch": slots}
    asked = prompts(140, 1, 6, 11)
    with Engine.load(build_engine(folder, nextn, drafter, dtype="bfloat16", **flags)) as engine:
        check(exact, asked, run_prompts(engine, asked, [GREEDY] * len(asked), together=True))
        check_logprobs(exact, asked, run_prompts(engine, asked, [HOT] * len(asked)))


@pytest.fixture
def one(checkpoint: Path, build_engine: EngineBuilder) -> Path:
    flags = {"target": "inductor", "device": "cuda", "prefill_chunk": CHUNK, "max_batch": 3}
    return build_engine(checkpoint, 3, "mtp-eagle", **flags)


@pytest.mark.parametrize("params", [GREEDY, HOT])
def test_state_is_updated_in_place(one: Path, params: SamplingParams) -> None:
    """A step takes less memory than one cache; a copy of it would be seen."""
    manifest = read_manifest(one)
    programs = CudaPrograms(manifest, Gpu(), open_packages(one, manifest), graphs=False)
    Engine(programs, manifest, overlap=False).generate(prompts(5, 6, 7), params)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    programs.step(np.array([True, True, True]), 100)
    assert torch.cuda.max_memory_allocated() - before < programs._state["kv.0"].nbytes


def test_modes_share_a_batch(one: Path) -> None:
    asked = prompts(3, 5, 1, 9)
    params = [HOT, replace(HOT, acceptance="rejection"), replace(GREEDY, logprobs=2), GREEDY]
    with Engine.load(one) as engine:
        together = engine.generate(asked, params)
        alone = [engine.generate(p, each) for p, each in zip(asked, params, strict=True)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


def test_another_gpu_is_refused(one: Path) -> None:
    manifest = read_manifest(one)
    older = manifest.target.model_copy(update={"compute_capabilities": ("5.0",)})
    changed = manifest.model_copy(update={"target": older})
    with pytest.raises(EngineError, match=r"this one has \d+\.\d; build it on this machine"):
        load(one, changed, Gpu(), open_packages(one, changed))


def test_too_little_memory(one: Path) -> None:
    class FullGpu(Gpu):
        def free_memory(self) -> int:
            return 1000

    with pytest.raises(EngineError, match=r"needs about .* GB of GPU memory .*, 0.00 GB are"):
        load_inductor(one, read_manifest(one), None, find_gpu=FullGpu)
