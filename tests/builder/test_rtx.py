"""The real TensorRT-RTX, which compiles without a GPU: `make test-tensorrt`."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import onnx.parser
import pytest

from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import Plan, make_state_specs
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.targets.onnxruntime import lowering
from mtpbuild.builder.targets.tensorrt_rtx import SORTED, TARGET
from mtpbuild.builder.targets.tensorrt_rtx.lowering import compile_graph
from mtpbuild.runtime import Engine
from mtpbuild.runtime.contract.manifest import check_files
from mtpbuild.runtime.errors import BuildError, EngineError
from tests.support import fake_cuda, fake_tensorrt
from tests.support.opened import opened
from tests.support.requests import build, build_request
from tests.support.styles import style_of

pytestmark = pytest.mark.tensorrt
trt: Any = pytest.importorskip(
    "tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed: tools/tensorrt_rtx_env.sh"
)

# What they do in TensorRT's place, by their own names; and what RTX's TensorRT does not have.
OF_FAKES = {"add_torch", "check", "run", "to_bytes"}
OF_DATA_CENTRES = {
    *("create_timing_cache", "get_timing_cache", "set_timing_cache", "set_communicator"),
}
HEADER = '<ir_version: 10, opset_import: ["": 24]> graph '


def plan_of(folder: Path, **changes: Any) -> Plan:
    style = style_of("tensorrt-rtx")
    plan = Plan(
        load_config(folder),
        *(3, "mtp-vanilla", 2, 100, 4),
        style,
        compute_capabilities=("8.9", "12.0"),
    )
    return replace(plan, **changes)


@pytest.fixture(scope="module")
def graphs(predictable_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the ONNX files that the target compiles, and their weights."""
    plan, folder = plan_of(predictable_folder), tmp_path_factory.mktemp("graphs")
    source = opened(predictable_folder, plan.config)
    places = EngineWeights(source).write(folder, siblings=folder / "none").places
    for program in make_programs(plan, source.model):
        lowering.lower(TARGET.trace(program, plan), places, folder)
    return folder


@pytest.mark.parametrize("program", ["prefill", "decode", "decode_mixed"])
def test_networks(program: str, graphs: Path, predictable_folder: Path) -> None:
    """One KVCacheUpdate per cache, from a network input to a network output; nothing foreign."""
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert parser.parse_from_file(str(graphs / f"{program}.onnx"))
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    writes = [layer for layer in layers if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    caches = [s.name for s in make_state_specs(plan_of(predictable_folder)) if s.role == "rows"]
    found = {layer.get_input(0).name: layer.get_output(0).name for layer in writes}
    assert found == {name: f"{name}.out" for name in caches}
    assert len(writes) == len(caches)
    kinds = Counter(layer.type.name for layer in layers)
    assert not [name for name in kinds if "PLUGIN" in name]
    assert ("CONDITION" in kinds) == (program == "decode_mixed")


@pytest.mark.parametrize("program", ["prefill", "decode", "decode_mixed"])
def test_engines_of_two_gpus(program: str, graphs: Path, predictable_folder: Path) -> None:
    engine = compile_graph(graphs / f"{program}.onnx", plan_of(predictable_folder))
    assert engine.nbytes > (graphs / "weights.safetensors").stat().st_size


def test_a_build(predictable_folder: Path, tmp_path: Path) -> None:
    """A request becomes a directory that is whole; this machine says that it has no GPU for it."""
    request = build_request(
        predictable_folder,
        (0,),
        out=tmp_path / "engine",
        target="tensorrt-rtx",
        compute_capability="sm120",
    )
    (built,) = build(request)
    check_files(built.folder, built.manifest, verify_hashes=True)
    assert built.manifest.target.versions == {"tensorrt-rtx": trt.__version__}
    (again,) = build(request)
    assert again.unchanged
    with pytest.raises(EngineError, match="no NVIDIA GPU can be used here: CUDA driver version is"):
        Engine.load(built.folder)


def test_fp32_needs_more_than_sm75(graphs: Path, predictable_folder: Path) -> None:
    """Why `--compute-capability sm75` is refused before anything is traced."""
    plan = plan_of(predictable_folder, compute_capabilities=("7.5",))
    with pytest.raises(BuildError, match=r"can't compile decode: .*FP32 GEMM is not") as caught:
        compile_graph(graphs / "decode.onnx", plan)
    assert "\n" not in str(caught.value)


def test_how_much_is_sorted(tmp_path: Path, predictable_folder: Path) -> None:
    """Why a large vocabulary is refused before anything is traced."""

    def sort(count: int) -> object:
        text = (
            f"(float[2,5000] x) => (float[2,{count}] v, int64[2,{count}] i) "
            f"{{ k = Constant<value = int64[1] {{{count}}}>() v, i = TopK(x, k) }}"
        )
        onnx.save(onnx.parser.parse_model(HEADER + text), tmp_path / "graph.onnx")
        return compile_graph(tmp_path / "graph.onnx", plan_of(predictable_folder))

    assert sort(SORTED)
    with pytest.raises(BuildError, match=r"can't (read|compile) graph: "):
        sort(SORTED + 1)


def test_the_fakes_have_the_real_names(predictable: PlainDeepseek) -> None:
    """The real modules have what the run time calls of the fakes, with as many arguments."""
    cuda: ModuleType = pytest.importorskip("cuda.bindings.runtime")
    assert cuda is sys.modules["cuda.bindings.runtime"]
    known = {name: fake for name, fake in vars(fake_cuda.FakeCuda).items() if name[:4] == "cuda"}
    calls = {name: fake for name, fake in known.items() if isinstance(fake, FunctionType)}
    values = [name for name in known if name not in calls]
    assert calls
    assert values
    for name in values:
        assert all(hasattr(getattr(cuda, name), member) for member in vars(known[name])), name
    for name, call in calls.items():
        head = (getattr(cuda, name).__doc__ or "").splitlines()[0]
        arguments = head.partition("(")[2].rpartition(")")[0]
        wanted = call.__code__.co_argcount - 1
        assert (arguments.count(",") + 1 if arguments else 0) == wanted, head
    pairs = {
        fake_tensorrt.Network: (trt.INetworkDefinition, trt.ICudaEngine),
        fake_tensorrt.Context: (trt.IExecutionContext,),
        fake_tensorrt.Runtime: (trt.Runtime,),
        fake_tensorrt.Refitter: (trt.Refitter,),
        fake_tensorrt.Config: (trt.IBuilderConfig,),
        fake_tensorrt.Profile: (trt.IOptimizationProfile,),
    }
    for fake, reals in pairs.items():
        names = [name for name, value in vars(fake).items() if name[0] != "_" and callable(value)]
        names = [name for name in names if name not in OF_FAKES | OF_DATA_CENTRES]
        lacking = [name for name in names if not any(hasattr(real, name) for real in reals)]
        assert not lacking, fake
    assert {"device_memory_size_v2", "num_io_tensors"} <= set(dir(trt.ICudaEngine))
