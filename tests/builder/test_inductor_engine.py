"""The built AOTInductor engine on the CPU: oracles O2, O3, O6, O7, state in place, refusals.

One engine for one request serves most tests, as compiling it takes a minute of a core.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import DrafterName
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.targets.inductor import lowering as target
from mtpbuild.runtime import Engine, EngineError, SamplingParams
from mtpbuild.runtime.contract.controls import StepControls
from mtpbuild.runtime.contract.manifest import MANIFEST, read_manifest
from mtpbuild.runtime.errors import BuildError, MissingDependencyError, advise_install
from mtpbuild.runtime.gpu import torch_cuda
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.aot_package import Package, open_packages
from mtpbuild.runtime.programs.inductor_cpu import InductorPrograms
from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms
from tests.reference.recompute import greedy
from tests.reference.sampling import check_alone, plain_text
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.constrained import check_masks
from tests.support.engines import EngineBuilder, greedy_ids
from tests.support.fake_gpu import FakeGpu, torch_finds
from tests.support.forced import check_programs
from tests.support.inductor_engines import (
    CHUNK,
    ENGINES,
    GREEDY,
    HOT,
    NEXTN,
    SHAPE,
    SLOTS,
    check_texts,
    compiled_soon,
    compiled_with,
    prompts,
)
from tests.support.requests import altered, build
from tests.support.stand_ins import importing

pytestmark = pytest.mark.xdist_group("inductor")  # the others would wait for the compiler


@pytest.fixture(scope="module")
def model() -> PlainDeepseek:
    torch.set_num_threads(1)
    return make_predictable(**SHAPE)


@pytest.fixture(scope="module")
def engine(
    model: PlainDeepseek, build_engine: EngineBuilder, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("one") / "one-layer", model, **SHAPE)
    with compiled_soon():
        return build_engine(folder, NEXTN, "mtp-eagle", target="inductor", prefill_chunk=CHUNK)


@pytest.fixture
def programs(engine: Path) -> InductorPrograms:
    return load(engine)


def load(engine: Path) -> InductorPrograms:
    programs = load_programs(engine, read_manifest(engine), threads=1)
    assert isinstance(programs, InductorPrograms)
    return programs


@pytest.mark.full
@pytest.mark.parametrize("params", [GREEDY, HOT])
def test_the_gpus_run_time_runs_it(engine: Path, params: SamplingParams) -> None:
    """Compiled programs, overlapping, on a GPU whose memory is the CPU's: the same tokens."""
    manifest, gpu = read_manifest(engine), FakeGpu()
    opener = open_packages(engine, manifest)
    programs = CudaPrograms(manifest, gpu, opener)  # type: ignore[arg-type]
    asked = prompts(6, 11)
    with (
        Engine(programs, manifest) as pretended,
        Engine.load(engine, threads=1, prefix_cache=False) as loaded,
    ):
        got, wanted = (e.generate(asked, params) for e in (pretended, loaded))
    assert [r.token_ids for r in got] == [r.token_ids for r in wanted]
    assert gpu.replays > 0


@pytest.mark.full
def test_masks(programs: InductorPrograms, engine: Path) -> None:
    check_masks(programs, read_manifest(engine))


@pytest.mark.full
def test_new_weights(engine: Path, tmp_path: Path) -> None:
    other = make_predictable(seed=1, **SHAPE)
    copy = shutil.copytree(engine, tmp_path / "engine")
    refit(copy, str(save_checkpoint(tmp_path / "other", other, **SHAPE)))
    asked = prompts(9)
    with Engine.load(copy, threads=1, prefix_cache=False) as loaded:
        (result,) = loaded.generate(asked, GREEDY)
    assert result.token_ids == greedy(other, asked[0], GREEDY.max_tokens)


@pytest.mark.full
def test_alternatives(engine: Path) -> None:
    with Engine.load(engine, threads=1, prefix_cache=False) as loaded:
        result = loaded.generate(prompts(5)[0], replace(GREEDY, logprobs=2))
    assert result.logprobs is not None
    assert [entry.top[0][0] for entry in result.logprobs] == result.token_ids


@pytest.mark.full
def test_penalties(engine: Path, model: PlainDeepseek) -> None:
    (asked,) = prompts(11)
    penalties: dict[str, Any] = {"presence_penalty": 1.0, "repetition_penalty": 1.3}
    penalised = replace(HOT, logit_bias={9: 2.0}, **penalties)
    with Engine.load(engine, threads=1, prefix_cache=False) as loaded:
        result = loaded.generate(asked, penalised)
    assert result.token_ids == plain_text(model, asked, penalised) != plain_text(model, asked, HOT)


@pytest.mark.full
@pytest.mark.parametrize("controls", [StepControls(), StepControls(temperature=0.8, seed=1)])
def test_state_is_updated_in_place(programs: InductorPrograms, controls: StepControls) -> None:
    """One row per token is written, and no step takes memory of the size of a cache."""
    programs.begin(0, 3, 7, controls)
    active, rows = np.array([True]), 250
    programs.step(active, rows)
    cache = programs.state["kv.0"]
    addresses = {name: array.ctypes.data for name, array in programs.state.items()}
    before, length = cache.copy(), int(programs.state["lengths"][0])
    taken = allocations(lambda: programs.step(active, rows))
    assert {name: array.ctypes.data for name, array in programs.state.items()} == addresses
    changed = np.flatnonzero((cache != before)[0].any(axis=(0, 2)))
    assert changed.tolist() == list(range(length, length + NEXTN + 1))
    scores = 4 * (NEXTN + 1) * rows * 4  # bytes; a step does take these
    assert scores <= max(taken) < cache.nbytes


def allocations(run: Callable[[], object]) -> list[int]:
    """Return bytes of each piece of memory that torch takes meanwhile."""
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]


def test_a_copied_cache_would_be_seen() -> None:
    cache = torch.zeros(1, 1, 250, 36)
    assert max(allocations(cache.clone)) == cache.nbytes


@pytest.mark.full
def test_weights_stay_mapped(programs: InductorPrograms, engine: Path) -> None:
    """One copy for all programs, in the file's pages."""
    place = str((engine / "weights.safetensors").resolve())
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    ranges = [line.split()[0].split("-") for line in maps if line.endswith(place)]
    for package in programs._packages.values():
        assert isinstance(package, Package)
        for weight in package._weights.values():
            address = weight.data_ptr()
            assert any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


@pytest.mark.full
def test_threads(engine: Path) -> None:
    """Set where the programs run: a thread has its own number."""
    one = greedy_ids(engine, prompts(9), 8)
    programs = load_programs(engine, read_manifest(engine), threads=2)
    programs.begin(0, 0, prompts(9)[0][0])
    programs.step(np.array([True]), 3)
    assert torch.get_num_threads() == 2
    with Engine.load(
        engine, threads=2, prefix_cache=False
    ) as loaded:  # its sums are others: a near-tie may come
        assert loaded.generate(prompts(9)[0], replace(GREEDY, max_tokens=8)).token_ids == one[0]
    torch.set_num_threads(1)


def edited(engine: Path, folder: Path, **fields: Any) -> Path:
    """Return a copy of the engine whose manifest says something else about its target."""
    copy = shutil.copytree(engine, folder / "engine")
    raw = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    raw["target"] |= fields
    (copy / MANIFEST).write_text(json.dumps(raw), encoding="utf-8")
    return copy


@pytest.mark.full
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"versions": {"torch": "2.1"}}, r"built for torch 2.1, this is torch .*'torch==2.1.\*'"),
        ({"versions": {}}, "built for torch None"),
        ({"hardware": "aarch64 CPU"}, "built for an aarch64 CPU, this is an x86-64 CPU with AVX2"),
    ],
)
def test_other_machines_are_refused(
    fields: dict[str, Any], says: str, engine: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=says):
        Engine.load(edited(engine, tmp_path, **fields))


@pytest.mark.full
def test_programs_that_are_none(engine: Path, tmp_path: Path) -> None:
    """Damage that the hashes don't show."""
    copy = edited(engine, tmp_path)
    for file, content in {"decode.pt2": b"PK", "prefill.constants.safetensors": b""}.items():
        sound = (copy / file).read_bytes()
        (copy / file).write_bytes(content)
        with pytest.raises(EngineError, match="can't load it") as caught:
            load_programs(copy, read_manifest(copy))
        assert "\n" not in str(caught.value)
        (copy / file).write_bytes(sound)
    load(copy)


@pytest.mark.full
def test_running_without_torch(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("mtpbuild.runtime.programs.")]:
        monkeypatch.delitem(sys.modules, name)
    need = f"this engine needs torch: {advise_install('inductor')}"
    says = f"^{re.escape(need)}$"
    with importing({"torch": None}), pytest.raises(MissingDependencyError, match=says):
        load_programs(engine, read_manifest(engine))


@pytest.mark.usefixtures("quick", "quick_inductor")
def test_engines_of_both_targets_share_weights(smallest: Path, tmp_path: Path) -> None:
    """They do where the weights are not packed for our kernels."""
    names: dict[str, dict[str, bool]] = {"onnxruntime": {"portable": True}, "inductor": {}}
    built = [
        build(BuildRequest(str(smallest), (0,), out=tmp_path / name, target=name, options=own))[0]
        for name, own in names.items()
    ]
    first, second = (engine.folder / "weights.safetensors" for engine in built)
    assert first.samefile(second)
    info = built[1].manifest.target
    assert (info.name, info.hardware) == ("inductor", "x86-64 CPU with AVX2")
    assert info.versions["torch"] == ".".join(torch.__version__.split(".")[:2])


@pytest.fixture
def small_place(smallest: Path, tmp_path: Path) -> Iterator[BuildRequest]:
    yield BuildRequest(str(smallest), (0,), out=tmp_path / "engine", target="inductor")
    assert not (tmp_path / "engine").exists()


def test_machines_that_can_not_build(
    small_place: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(target, "name_this_machine", lambda: "aarch64 CPU")
        with pytest.raises(BuildError, match="builds on an x86-64 CPU with AVX2, this is an aarch"):
            build(small_place)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="needs a C\\+\\+ compiler"):
        build(small_place)


def test_a_gpu_that_is_not_there(small_place: BuildRequest) -> None:
    says = "torch finds none.*; --compute-capability sm90 .* builds"
    with torch_finds(0), pytest.raises(BuildError, match=says) as caught:
        build(altered(small_place, device="cuda"))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("quick_inductor")
def test_a_dry_run_lists_the_gpu_that_is_missing(small_place: BuildRequest) -> None:
    asked = altered(small_place, device="cuda", dry_run=True)
    with torch_finds(0):
        done = dry_run(asked, Stages())
    (line,) = done.lacking
    assert re.match(
        "no NVIDIA GPU can be used here: torch finds none.*; --compute-capability", line
    )
    assert done.engines[0].plan.compute_capabilities == ("10.0",)


@pytest.mark.usefixtures("quick_inductor")
def test_an_engine_says_which_gpu_it_is_for(
    small_place: BuildRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu("9.0")
    with monkeypatch.context() as patch:
        patch.setattr(torch_cuda, "Gpu", lambda: gpu)
        (built,) = build(altered(small_place, device="cuda"))
        gpu.compute_capability = "10.0"
        (again,) = build(altered(small_place, device="cuda"))
    assert not again.unchanged, "another GPU, another engine"
    info = built.manifest.target
    assert info.hardware == "NVIDIA GPU of compute capability 9.0"
    assert info.compute_capabilities == ("9.0",)
    with pytest.raises(EngineError, match="no NVIDIA GPU can be used here"):
        Engine.load(built.folder, prefix_cache=False)
    shutil.rmtree(built.folder)


@pytest.mark.full
def test_a_compiler_that_fails(small_place: BuildRequest) -> None:
    says = r"C\+\+ compiler failed .*z80"
    with compiled_with("cpp.march", "z80"), pytest.raises(BuildError, match=says) as caught:
        build(small_place)
    assert "\n" not in str(caught.value)


def test_a_library_that_torch_could_not_load(tmp_path: Path) -> None:
    """Two copies of libstdc++ in a process crash when a program is loaded."""
    (source := tmp_path / "text.cpp").write_text("#include <iostream>\nvoid f() { std::cout; }")
    library = tmp_path / "text.so"
    compile = ["g++", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run([*compile, "-O0"], check=True)
    target.check_parts([library])
    subprocess.run([*compile, "-static-libstdc++"], check=True)
    with pytest.raises(BuildError, match=r"links libstdc\+\+ statically"):
        target.check_parts([library])
    target.check_parts([source])
    assert source.read_text() == "", "its name alone is read"


@pytest.mark.full
@pytest.mark.parametrize(("nextn", "drafter"), ENGINES)
def test_every_step_equals_recomputation(
    nextn: int,
    drafter: DrafterName | None,
    predictable: PlainDeepseek,
    predictable_engine: EngineBuilder,
) -> None:
    """One slot, where all is static, and several."""
    for slots in (1, SLOTS):
        engine = predictable_engine(nextn, drafter, target="inductor", max_batch=slots)
        check_programs(load(engine), predictable, nextn, drafter, CHUNK)
        check_texts(engine, predictable)


@pytest.mark.full
def test_modes_share_a_batch(predictable_engine: EngineBuilder) -> None:
    params = [HOT, replace(HOT, acceptance="rejection"), replace(GREEDY, logprobs=2), GREEDY]
    engine = predictable_engine(3, target="inductor", max_batch=SLOTS)
    with Engine.load(engine, threads=1, prefix_cache=False) as loaded:
        check_alone(loaded, prompts(3, 5, 1, 9), params)


@pytest.mark.full
def test_the_same_tokens_as_onnxruntime(tiny_engine: Callable[..., Path]) -> None:
    """deepseek-tiny, the weights that the repository ships."""
    texts = []
    for name in ("onnxruntime", "inductor"):
        with Engine.load(tiny_engine(3, target=name), prefix_cache=False) as engine:
            results = engine.generate(
                ["def fibonacci(n):", "class Stack:\n"], SamplingParams(max_tokens=64)
            )
            texts.append([result.token_ids for result in results])
    assert texts[0] == texts[1]


def test_options_that_a_torch_lacks() -> None:
    """Older versions don't know all; what is for a CPU means nothing to a GPU's code."""
    old = SimpleNamespace(
        aot_inductor=SimpleNamespace(package=False, package_constants_in_so=True),
        cpp=SimpleNamespace(simdlen=None),
        always_keep_tensor_constants=False,
    )
    common = {
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        "always_keep_tensor_constants": True,
    }
    assert target.aoti_options(True, old) == common
    assert target.aoti_options(False, old) == common | {"cpp.simdlen": 256}
    assert len(target.aoti_options(False)) == len(target.aoti_options(True)) + 4
