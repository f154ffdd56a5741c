"""Target tensorrt from build to tokens, on a fake GPU with the rules of the real one."""

import gc
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file

from mtpbuild.builder.compiler.manifest_of import describe_files
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import ALIGNED_ROWS, Plan
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.targets import tensorrt as target_tensorrt
from mtpbuild.builder.targets import tensorrt_rtx
from mtpbuild.builder.targets.tensorrt import lowering
from mtpbuild.builder.targets.tensorrt.compiling import make_compiler_config
from mtpbuild.plugins.ptx import ContractError
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import (
    WEIGHTS,
    Manifest,
    check_files,
    read_manifest,
)
from mtpbuild.runtime.errors import (
    BuildError,
    EngineError,
    MissingDependencyError,
    MtpbuildError,
    advise_install,
)
from mtpbuild.runtime.programs import tensorrt
from mtpbuild.runtime.programs.tensorrt_api import as_stored
from mtpbuild.runtime.programs.tensorrt_engines import TensorRtPrograms
from tests.reference.sampling import check_texts
from tests.support.checkpoints import SMALLEST, make_model, make_predictable, save_checkpoint
from tests.support.engines import EngineBuilder
from tests.support.fake_cuda import OUT_OF_MEMORY, FakeCuda
from tests.support.fake_target import quick_target
from tests.support.fake_tensorrt import VERSION, DataType, FakeTensorRt, Network, Weights
from tests.support.fake_torch_tensorrt import installed
from tests.support.requests import build, build_request
from tests.support.stand_ins import failing, importing
from tests.support.styles import style_of

pytestmark = pytest.mark.xdist_group("tensorrt")  # another worker would wait for the engine
CHUNK, SLOTS, COUNT = 4, 2, 40
SIZES = {
    **{"target": "tensorrt", "dtype": "float32", "max_batch": SLOTS},
    **{"max_seq_len": 100, "prefill_chunk": CHUNK},
}
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
HOT = replace(GREEDY, temperature=0.8, top_p=0.95, top_k=30, seed=5)
LENGTHS = (9, 1, 2, CHUNK, CHUNK + 1, 25)
PROMPTS = [np.random.default_rng(n).integers(9, 61, n).tolist() for n in LENGTHS]


@pytest.fixture
def gpu() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def trt(gpu: FakeCuda) -> Iterator[FakeTensorRt]:
    """Stand in for TensorRT, Torch-TensorRT and CUDA, even where they are installed."""
    fake = FakeTensorRt(gpu)
    with installed(fake):
        yield fake


@pytest.fixture(scope="session")
def model() -> PlainDeepseek:
    return make_predictable(**SMALLEST)


@pytest.fixture(scope="session")
def folder(model: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("rtx") / "rtx", model, **SMALLEST)


@pytest.fixture
def engine(folder: Path, build_engine: EngineBuilder, trt: FakeTensorRt) -> Path:
    """One layer and one module, vanilla: prefill carries hidden states from chunk to chunk."""
    return build_engine(folder, 1, **SIZES)


def load(engine: Path) -> TensorRtPrograms:
    return tensorrt.load(engine, read_manifest(engine), None)


def changed(engine: Path, **target: object) -> Manifest:
    manifest = read_manifest(engine)
    return manifest.model_copy(update={"target": manifest.target.model_copy(update=target)})


@pytest.mark.full
def test_texts_are_the_models(engine: Path, model: PlainDeepseek) -> None:
    """O2 and O7: more requests than slots, in chunks, left and taken at different steps.

    Sampled and greedy ones share steps, and take each other's slots.
    """
    params = [replace(GREEDY, max_tokens=count) for count in (5, 40, 17, 3, 30, 11)]
    with Engine.load(engine) as loaded:
        results = check_texts(loaded, model, [*PROMPTS, *PROMPTS[:2]], [*params, HOT, GREEDY])
    assert sum(r.metrics.speculative_decoding.num_accepted_draft_tokens for r in results) > 20


@pytest.mark.full
def test_prompts_begin_with_rows_of_earlier_ones(engine: Path, model: PlainDeepseek) -> None:
    """The second turns of conversations, over fewer slots."""
    asked, params = PROMPTS, replace(GREEDY, max_tokens=12)
    with Engine.load(engine, prefix_cache=True, prefix_cache_bytes=1 << 20) as loaded:
        known = [0] * len(asked)
        for _ in range(2):
            results = check_texts(loaded, model, asked, [params] * len(asked))
            assert all(r.metrics.cached_tokens >= n for r, n in zip(results, known, strict=True))
            asked = [[*p, *r.token_ids, 7, 9] for p, r in zip(asked, results, strict=True)]
            known = [len(prompt) - 2 - loaded.manifest.lookahead for prompt in asked]


@pytest.mark.full
def test_a_step_is_one_launch(engine: Path, gpu: FakeCuda, trt: FakeTensorRt) -> None:
    """All state stays where it is: a step copies the host's words and the carries, not caches."""
    programs = load(engine)
    assert gpu.launches == 0
    warm = [context.runs for context in trt.contexts]
    assert sorted(warm) == [0, 1, 1], "decode programs once, prefill at its first chunk"
    taken = gpu.free
    addresses = [dict(context.addresses) for context in trt.contexts]
    programs.begin(0, 0, 7)
    for step in range(3):
        output = programs.step(np.array([True, False]), 10)
        assert output.num_tokens[0] >= 1
        assert output.num_tokens[1] == 0
        assert gpu.launches == step + 1
    assert gpu.free == taken
    assert [dict(context.addresses) for context in trt.contexts] == addresses
    assert len({context.scratch for context in trt.contexts}) == 1


@pytest.mark.full
def test_inactive_slots_keep_what_they_hold(engine: Path) -> None:
    programs = load(engine)
    programs.prefill(1, 0, np.array([5, 6, 7, 8]))
    programs.begin(1, 3, 8)
    before = programs.state
    programs.begin(0, 0, 7)
    programs.step(np.array([True, False]), 10)
    for name, array in programs.state.items():
        kept = array[1, :, : -(1 + 1)] if name.startswith(("kv", "mtp_kv")) else array[1]
        was = before[name][1, :, : -(1 + 1)] if kept.ndim == 3 else before[name][1]
        np.testing.assert_array_equal(kept, was, err_msg=name)


@pytest.mark.full
def test_a_closed_engine_leaves_the_gpu(engine: Path, gpu: FakeCuda) -> None:
    free = gpu.free
    loaded = Engine.load(engine)
    assert gpu.free < free
    loaded.generate(PROMPTS[0], GREEDY)
    loaded.close()
    del loaded
    gc.collect()
    assert gpu.free == free
    assert not gpu.host


@pytest.mark.full
def test_the_directory(engine: Path) -> None:
    """Three programs, of which prefill alone has a size that varies."""
    manifest = read_manifest(engine)
    check_files(engine, manifest, verify_hashes=True)
    assert manifest.target.compute_capabilities == ("12.0",)
    assert manifest.target.versions == {"tensorrt": VERSION}
    rows = [spec.sizes["rows"] for spec in manifest.state if spec.role == "rows"]
    assert rows
    assert all(n % ALIGNED_ROWS == 0 and n >= 102 for n in rows)
    for name, program in manifest.programs.items():
        network: Network = torch.load(engine / program.file, weights_only=False)
        names = {tensor.name for tensor in program.inputs}
        assert {name for name in network.tensors if "weight:" not in name} >= names
        profile = {"tokens": [(1, 1), (1, 4), (1, 4)]} if name == "prefill" else {}
        assert network.profile == profile


def cheap_plan(vocab_size: int = 61) -> Plan:
    config = make_model(vocab_size=vocab_size).config
    style = style_of("tensorrt-rtx")
    return Plan(config, 0, None, 1, 64, 4, style, compute_capabilities=("12.0",))


def refusal(engine: Path, manifest: Manifest | None = None) -> str:
    with pytest.raises(MtpbuildError) as caught:
        tensorrt.load(engine, manifest or read_manifest(engine), None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "code", "says"),
    [
        ("cudaGetDeviceCount", 100, "no NVIDIA GPU can be used here: no CUDA-capable device is "),
        ("cudaMalloc", OUT_OF_MEMORY, "cudaMalloc failed: out of memory"),
    ],
)
def test_cuda_fails(function: str, code: int, says: str, engine: Path, gpu: FakeCuda) -> None:
    """There is no GPU, or another process takes its memory meanwhile."""
    gpu.fail[function] = code
    assert refusal(engine).startswith(says)


class TestWhatCanNotRun:
    def test_another_gpu(self, engine: Path, gpu: FakeCuda) -> None:
        gpu.capability = (9, 0)
        says = "built for an NVIDIA GPU of compute capability 12.0, this one has 9.0; build"
        assert says in refusal(engine)

    def test_another_version(self, engine: Path) -> None:
        manifest = changed(engine, versions={"tensorrt": "1.5.0.114"})
        assert f"built by tensorrt 1.5.0.114, this is {VERSION};" in refusal(engine, manifest)

    def test_too_little_memory(self, engine: Path, gpu: FakeCuda) -> None:
        """Both numbers, and nothing is loaded."""
        gpu.free = 100_000
        says = refusal(engine)
        assert "GB of GPU memory" in says
        assert ", 0.00 GB are free; build with a smaller `--max-batch` or `--max-seq-len`" in says
        assert not gpu.device

    @pytest.mark.parametrize("module", ["tensorrt", "cuda.bindings.runtime"])
    def test_missing_packages(self, engine: Path, module: str) -> None:
        with importing({module: None}), pytest.raises(MissingDependencyError) as caught:
            load(engine)
        assert advise_install("tensorrt") in str(caught.value)

    def test_the_other_flavour(self, engine: Path, trt: FakeTensorRt) -> None:
        """TensorRT-RTX's engines run the same way, by its own package."""
        manifest = changed(engine, name="tensorrt-rtx", versions={"tensorrt-rtx": VERSION})
        with importing({"tensorrt_rtx_bindings": None}):
            assert refusal(engine, manifest).endswith(advise_install("tensorrt-rtx"))
        with importing({"tensorrt_rtx_bindings": trt}):
            programs = tensorrt.load(engine, manifest, None)
        programs.begin(0, 0, 7)
        assert programs.step(np.array([True, False]), 10).num_tokens[0] >= 1

    def test_programs_that_are_not_the_manifests(self, engine: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(engine, tmp_path / "copy")
        (copy / "decode.engine").write_bytes(b"half an engine")
        says = f"{copy / 'decode.engine'}: TensorRT can't load it (Magic tag does not match)"
        assert refusal(copy) == f"{says}; rebuild the engine"
        shutil.copy(copy / "decode_mixed.engine", copy / "decode.engine")
        assert refusal(copy).startswith(f"{copy / 'decode.engine'}: banned_ids is not what engine")

    def test_requests_beyond_the_engine(self, engine: Path) -> None:
        """The profile's chunk, and the caches' rows: the loop asks for neither."""
        programs = load(engine)
        with pytest.raises(EngineError, match=r"prefill.engine takes no tokens of \[1, 5\]"):
            programs.prefill(0, 0, np.arange(CHUNK + 2))
        with pytest.raises(EngineError, match="internal: 129 cache rows asked for, 128 allocated"):
            programs.step(np.array([True, False]), 129)


@pytest.fixture
def stripped(folder: Path, trt: FakeTensorRt, build_engine: EngineBuilder, tmp_path: Path) -> Path:
    """Return an engine whose weights are put back when it is loaded."""
    engine = build_engine(folder, 0, strip_weights=True, **SIZES)
    return shutil.copytree(engine, tmp_path / "stripped")


def described(folder: Path) -> Manifest:
    """Describe the engine with the files as they are now."""
    manifest = read_manifest(folder)
    return manifest.model_copy(update={"files": describe_files(folder, {})})


class TestWeightsPutBack:
    @pytest.mark.parametrize("damage", ["missing", "another size"])
    def test_weights_that_do_not_fit(self, stripped: Path, damage: str) -> None:
        path = stripped / WEIGHTS
        weights = load_numpy(path)
        name = "embed_tokens"
        if damage == "missing":
            del weights[name]
        else:
            weights[name] = np.zeros(weights[name].size + 1, np.float32)
        save_file(weights, path)
        says = refusal(stripped, described(stripped))
        assert says.endswith("; rebuild the engine")
        assert f"{name} of " in says

    def test_quantised_values(self, trt: FakeTensorRt) -> None:
        """NumPy has no such types: bytes go in as what the engine has them for, if they fit."""
        held = np.arange(12, dtype=np.uint8)
        prototype, api = Weights(DataType.FP4, 0, 24), cast(ModuleType, trt)
        given = as_stored(api, held, prototype)
        assert (given.dtype, given.address, given.size) == (DataType.FP4, held.ctypes.data, 24)
        assert as_stored(api, held[1:], prototype) is None
        floats = np.zeros(3, np.float32)
        assert as_stored(api, floats, prototype) is floats

    def test_a_refit_that_fails(self, stripped: Path, trt: FakeTensorRt) -> None:
        trt.refit_fails = "out of\nmemory"
        says = "TensorRT can't refit prefill (out of memory); rebuild it"
        assert refusal(stripped, described(stripped)).endswith(says)

    def test_memory_is_counted_for_each_program(self, stripped: Path, gpu: FakeCuda) -> None:
        manifest = described(stripped)
        gpu.free = 2 * manifest.files[WEIGHTS].size
        assert "GB of GPU memory" in refusal(stripped, manifest)


@pytest.fixture
def place(folder: Path, tmp_path: Path, trt: FakeTensorRt) -> Iterator[BuildRequest]:
    """Expect the block's build to fail, and to leave no engine."""
    yield build_request(folder, (0,), out=tmp_path / "engine", target="tensorrt")
    assert not (tmp_path / "engine").exists()


def test_rtx_without_its_package(place: BuildRequest) -> None:
    asked = replace(place, target="tensorrt-rtx", options={"compute_capability": "sm120"})
    missing = importing({"tensorrt_rtx_bindings": None})
    with missing, pytest.raises(MissingDependencyError) as caught:
        build(asked)
    says = f"target tensorrt-rtx needs tensorrt_rtx_bindings: {advise_install('tensorrt-rtx')}"
    assert str(caught.value) == says


def test_large_vocabularies() -> None:
    model: Any = None  # the vocabulary alone is looked at
    tensorrt_rtx.TARGET.check_model(model, cheap_plan(3840))
    with pytest.raises(BuildError, match="the model has 3841 tokens, and TensorRT-RTX s"):
        tensorrt_rtx.TARGET.check_model(model, cheap_plan(3841))


class TestWhatCanNotBeBuilt:
    def test_the_build_wants_the_gpu_and_the_packages(
        self, place: BuildRequest, gpu: FakeCuda, trt: FakeTensorRt
    ) -> None:
        begin, end = "target tensorrt can't compile here: ", " (checked: flags and config.json: "
        no_cuda = f"using a GPU needs cuda.bindings.runtime: {advise_install('tensorrt')}"
        no_gpu = "no NVIDIA GPU can be used here: no CUDA-capable device is detected"
        no_trt = f"target tensorrt needs tensorrt: {advise_install('tensorrt')}"
        no_compiler = (
            "building for target tensorrt needs torch_tensorrt: "
            f"{advise_install('tensorrt,tensorrt-build,build')}"
        )
        have = {"tensorrt": trt, "torch_tensorrt.dynamo": None}
        for modules, code, says in (
            ({"cuda.bindings.runtime": None, **have}, 0, f"{no_cuda}; {no_compiler}"),
            ({"tensorrt": None}, 100, f"{no_gpu}; {no_trt}"),
            (have, 0, no_compiler),
        ):
            gpu.fail["cudaGetDeviceCount"] = code
            if not code:
                gpu.fail.clear()
            with importing(modules), pytest.raises(BuildError) as caught:
                build(place)
            assert str(caught.value).startswith(begin + says + end)

    @pytest.mark.usefixtures("trt")
    def test_kernels_that_can_not_be_plugins(self) -> None:
        plan = replace(cheap_plan(), compute_capabilities=("7.5",))
        says = "kernels are for GPUs of compute capability 8.0 and later, this one has 7.5"
        with pytest.raises(BuildError, match=says):
            target_tensorrt.TARGET.check_machine(plan)
        missing, says = importing({"triton": None}), "needs triton: pip install '"
        with missing, pytest.raises(BuildError, match=says):
            target_tensorrt.TARGET.check_machine(cheap_plan())
        refusal = ContractError("mla_partial: 65536 bytes of shared memory > 49152\n\nin a graph")
        with failing(lowering, "convert", refusal), pytest.raises(BuildError) as caught:
            lowering.compile_program(cast(TracedProgram, None), {}, strip=False, fast=False)
        says = "can't launch a kernel (mla_partial: 65536 bytes of shared memory > 49152)"
        assert str(caught.value) == f"target tensorrt: TensorRT {says}"

    @pytest.mark.usefixtures("quick", "trt")
    @pytest.mark.parametrize("strip", [False, True])
    def test_where_the_weights_are(self, strip: bool, folder: Path, tmp_path: Path) -> None:
        def lower(traced: TracedProgram, weights: object, folder: Path) -> str:
            assert traced.plan.style.embeds_weights != strip
            (folder / f"{traced.name}.engine").write_bytes(b"an engine")
            return f"{traced.name}.engine"

        request = build_request(
            folder, (0,), out=tmp_path / "out", target="tensorrt", strip_weights=strip
        )
        quick = quick_target("tensorrt", check_machine=lambda plan: None, lower=lower)
        with quick:
            (built,) = build(request)
            (other,) = build(replace(request, nextn=(1,), out=tmp_path / "other"))
        assert (WEIGHTS in built.manifest.files) == strip
        check_files(built.folder, built.manifest, verify_hashes=True)
        held = [folder / WEIGHTS for folder in (built.folder, other.folder)]
        assert [file.exists() for file in held] == [strip, strip]
        assert len({file.stat().st_ino for file in held if file.exists()}) == strip, "one copy"

    def test_a_fast_build(self, trt: FakeTensorRt) -> None:
        builder = trt.Builder(None)
        network: Any = Network()
        plain = make_compiler_config(trt, builder, network, cheap_plan())  # type: ignore[arg-type]
        quick = make_compiler_config(trt, builder, network, cheap_plan(), fast=True)  # type: ignore[arg-type]
        levels = plain.builder_optimization_level, quick.builder_optimization_level
        assert levels == (3, 1)


@pytest.mark.parametrize(
    ("asked", "found"),
    [("sm120, SM89,12.0", ("8.9", "12.0")), ("12.1,8.6,sm_80", ("8.0", "8.6", "12.1"))],
)
def test_compute_capabilities(asked: str, found: tuple[str, ...]) -> None:
    assert tensorrt_rtx.TensorRtRtx(asked).compute_capabilities(BuildRequest("x")) == found
