"""Ranks of target tensorrt, from the headline command to tokens, on fakes of NVIDIA's packages.

The lowering and the run time are the real ones, each rank is a process; what stands in for
TensorRT, Torch-TensorRT, CUDA and NCCL is in `tests/support/fake_torch_tensorrt.py`.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.weights.scheme import make_scheme
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime import Engine
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest
from mtpbuild.runtime.errors import BuildError, EngineError
from mtpbuild.runtime.gpu.cuda import Device
from mtpbuild.runtime.programs.tensorrt import held_bytes
from mtpbuild.runtime.programs.tensorrt_engines import on_device
from tests.reference.recompute import greedy
from tests.reference.sampling import check_texts
from tests.support import eager_ranks, trt_ranks
from tests.support.checkpoints import QUANTIZABLE, make_predictable, save_checkpoint
from tests.support.fake_tensorrt import FakeTensorRt, LayerType
from tests.support.fake_torch_tensorrt import MISMATCH
from tests.support.invoke import invoke
from tests.support.rank_engines import (
    GREEDY,
    HOT,
    PROMPT,
    SHAPE,
    followers,
    make,
    running,
)
from tests.support.requests import build, build_request, quantize
from tests.support.trt_engines import (
    SMALL_STEPS,
    Alteration,
    altered_engine,
    exchanged,
    greedy_text,
    left_out,
    one_rank,
    r1_like,
)

pytestmark = [
    pytest.mark.xdist_group("inductor"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own, in export and gloo
]
NEXTN, COUNT = 3, 12
STEPS = ("--prefill-chunk", "4", "--max-seq-len", "100")  # as SMALL_STEPS
APART = ("--tp", "8", "--target", "tensorrt", "--rank")
IN_STEPS = ("_a_layernorm.weight", ".w_uk", ".w_uv", ".e_score_correction_bias")


@pytest.fixture(scope="module")
def trt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeTensorRt]:
    """Stand in for a machine with eight GPUs and NVIDIA's packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(eager_ranks.GPUS, "8")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with trt_ranks.used() as fake:
            yield fake


@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return r1_like(tmp_path_factory.mktemp("r1"))


def headline(r1: Path, out: Path, *flags: Any) -> tuple[int, str, str]:
    """Say `mtpbuild build --model deepseek-r1-fp4 --nextn 3` of the small checkpoint."""
    command = ("build", "--model", "deepseek-r1-fp4", "--checkpoint", r1, "--nextn", str(NEXTN))
    return invoke(*command, *STEPS, "--out", out, *flags)


@pytest.fixture(scope="module")
def engine(trt: FakeTensorRt, r1: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "engine"
    code, output, err = headline(r1, out, "--tp", "2")
    assert (code, err) == (0, "")
    assert "lower decode rank0 " in output
    assert "lower decode rank1 " in output
    assert "trace decode rank1" not in output, "the graph is the same for all"
    return out


def tokens(engine: Path, prompt: list[int]) -> list[int]:
    """Return what `mtpbuild run` says."""
    ids = ",".join(map(str, prompt))
    flags = ("--prompt-ids", ids, "--max-tokens", str(COUNT), "--ignore-eos", "--json")
    code, out, err = invoke("run", "--engine", engine, *flags)
    assert (code, err) == (0, "")
    found: list[int] = json.loads(out)["token_ids"]
    assert not followers()
    return found


@pytest.mark.full
def test_the_headline_command(engine: Path, trt: FakeTensorRt, r1: Path, tmp_path: Path) -> None:
    """O2: nvfp4 experts, a module in bf16, two ranks; their tokens are one rank's."""
    manifest = read_manifest(engine)
    assert (manifest.build.tp, manifest.build.weights, manifest.build.dtype) == (
        *(2, "nvfp4"),
        "bfloat16",
    )
    for rank in (0, 1):
        files = sorted(path.name for path in (engine / f"rank{rank}").glob("*.engine"))
        assert files == ["decode.engine", "decode_mixed.engine", "prefill.engine"]
        shares_weights(engine / f"rank{rank}", trt)
    before = len(trt.nccl.done)
    assert tokens(engine, PROMPT) == greedy_text(one_rank(r1, NEXTN, tmp_path), PROMPT, COUNT)
    done = trt.nccl.done[before:]
    assert len(done) > 100
    wide = [each for each in done if "bfloat16" not in each]
    assert all("[1, 4, 10]" in each or "[1, 1, 10]" in each for each in wide[-8:]), (
        "what is summed in fp32 are the best of each rank's logits"
    )
    launches = trt.gpu.launches
    # `run` warms up with a step of its own.
    assert 0 < launches <= COUNT + 1, "a step is one CUDA graph, its collectives in it"


def shares_weights(rank: Path, trt: FakeTensorRt) -> None:
    """Experts are no constants: all programs are given the same ones, from the rank's file.

    Steps are also given what the kernels between their products read.
    """
    manifest, weights = read_manifest(rank), load_file(rank / WEIGHTS)
    experts = {name for name in weights if ".mlp.gate_up_proj" in name or ".mlp.down_proj" in name}
    given = {p: json.loads((rank / f"{p}.shared.json").read_text()) for p in manifest.programs}
    assert {*given["prefill"]} == {name for name in experts if name.startswith("layers.")}
    between = {name for name in weights if name.endswith(IN_STEPS)}
    assert {*given["decode"]} == {*given["decode_mixed"]} == experts | between | {"lm_head"}
    assert len(between) == 2 * 5, "the layer's and the module's"
    shared = sum(weights[name].nbytes for name in given["decode"])
    size = sum(manifest.files[p.file].size for p in manifest.programs.values())
    assert held_bytes(rank, manifest) == size + shared
    for name in given:
        assert (
            weights["layers.0.mlp.gate_up_proj.values"].numpy().tobytes()
            not in (rank / f"{name}.engine").read_bytes()
        )


@pytest.mark.full
def test_a_dry_run_counts_what_programs_hold(engine: Path, r1: Path, trt: FakeTensorRt) -> None:
    """As the engine's own files say; a GPU that has less is refused before anything is compiled."""
    request = build_request(r1, (NEXTN,), target="tensorrt", tp=2, **SMALL_STEPS)
    (foreseen,) = dry_run(request, Stages()).engines
    rank = engine / "rank0"
    weights = {name: tensor.nbytes for name, tensor in load_file(rank / WEIGHTS).items()}
    given = json.loads((rank / "decode.shared.json").read_text())
    in_steps = sum(weights[name] for name in given if name.endswith(IN_STEPS))
    shared, every = sum(weights[name] for name in given) - in_steps, sum(weights.values())
    assert foreseen.weight_file_bytes == pytest.approx(every, rel=1e-3)
    assert foreseen.loaded_weight_bytes == pytest.approx(
        3 * every - 2 * shared - in_steps, rel=1e-3
    )
    assert foreseen.loaded_weight_bytes < 2 * foreseen.weight_file_bytes
    networks = len(trt.networks)
    trt.gpu.free, free = foreseen.loaded_weight_bytes, trt.gpu.free
    says = "an engine's programs hold .* GB of weights per rank, state takes .* --tp splits"
    with pytest.raises(BuildError, match=says):
        build(request)
    trt.gpu.free = free
    assert len(trt.networks) == networks


@pytest.mark.full
def test_a_weight_that_is_not_there(engine: Path, tmp_path: Path, trt: FakeTensorRt) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(engine / "rank0", alone)
    names = json.loads((alone / "decode.shared.json").read_text())
    (alone / "decode.shared.json").write_text(json.dumps([*names, "x"]))
    device = Device("tensorrt")
    with pytest.raises(EngineError, match=r"weights.safetensors: has no x; rebuild the engine$"):
        on_device(device, alone, read_manifest(alone).programs)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("program", ["decode", "decode_mixed", "prefill"])
@pytest.mark.parametrize("bug", [exchanged, left_out])
@pytest.mark.usefixtures("trt")
def test_seeded_bugs(
    bug: Alteration, program: str, rank: int, engine: Path, tmp_path: Path
) -> None:
    """The run ends with one line, and no rank outlives it."""
    altered = altered_engine(engine, tmp_path / "altered", rank, program, bug)
    code, out, err = invoke("run", "--engine", altered, "--prompt-ids", "5,6")
    assert (code, out) == (1, "")
    assert MISMATCH in err
    assert err.count("\n") == 1
    assert not followers()


@pytest.fixture(scope="module")
def predictable_shape() -> PlainDeepseek:
    return make_predictable(**SHAPE)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        {"tp": 2},
        {"tp": 2, "ep": 2, "strip_weights": True},
        {"tp": 4, "ep": 2, "max_batch": 2},
        {"tp": 2, "attention_dp": True},
        {"tp": 4, "ep": 2, "attention_dp": True, "max_batch": 2},
    ],
)
def test_tokens(
    flags: dict[str, Any], trt: FakeTensorRt, predictable_shape: PlainDeepseek, tmp_path: Path
) -> None:
    """O2: in fp32 the plain model's, greedy and sampled, two requests and more at once."""
    checkpoint = save_checkpoint(tmp_path / "shared", predictable_shape, **SHAPE)
    asked = {"target": "tensorrt", "dtype": "float32", "max_seq_len": 100} | flags
    folder = make(checkpoint, tmp_path / "engine", nextn=2, **asked)
    prompts, params = [PROMPT, [5], PROMPT, [9, 3]], [GREEDY, GREEDY, HOT, GREEDY]
    with running(folder) as loaded:
        check_texts(loaded, predictable_shape, prompts, params)
    assert not followers()


@pytest.mark.full
@pytest.mark.parametrize("slots", [1, 33])
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_quantised_products(format: str, slots: int, trt: FakeTensorRt, tmp_path: Path) -> None:
    """Of up to 64 tokens in a step they are plugins, of more and of prompts constants."""
    save_checkpoint(tmp_path / "plain", make_predictable(**QUANTIZABLE), **QUANTIZABLE)
    checkpoint = tmp_path / format
    quantize(QuantizeRequest(str(tmp_path / "plain"), make_scheme(format, None, None), checkpoint))
    asked: dict[str, Any] = {"dtype": "float32", "max_batch": slots, **SMALL_STEPS}
    request = build_request(checkpoint, (1,), target="tensorrt", out=tmp_path / "engine", **asked)
    (foreseen,) = dry_run(request, Stages()).engines
    before = len(trt.networks)
    (engine,) = build(request)
    for network, program in zip(trt.networks[before:], engine.manifest.programs, strict=True):
        kinds = {layer.function: layer.type for layer in network.layers}
        in_step = program != "prefill" and slots == 1
        assert ("dequantize" in kinds) != in_step
        assert (kinds.get("mtpbuild::matmul_scaled.") is LayerType.PLUGIN_V3) == in_step
    weights = {name: w.nbytes for name, w in load_file(engine.folder / WEIGHTS).items()}
    given = json.loads((engine.folder / "decode.shared.json").read_text())
    scaled = {name for name in given if name.endswith((".values", ".scales", ".scales_2"))}
    assert bool(scaled) == (slots == 1)
    in_steps = sum(weights[name] for name in given)  # few experts: no kernel reads them in prompts
    held = 3 * sum(weights.values()) - in_steps
    assert slots > 1 or foreseen.loaded_weight_bytes == pytest.approx(held, rel=1e-3)
    with Engine.load(engine.folder) as loaded:
        (result,) = loaded.generate([[5, 17, 3]], GREEDY)
    plain = load_plain(checkpoint)
    assert result.token_ids == greedy(plain, [5, 17, 3], len(result.token_ids))


@pytest.mark.full
@pytest.mark.usefixtures("trt")
def test_stripped(r1: Path, tmp_path: Path) -> None:
    """Weights in bfloat16 and nvfp4 are put back when a rank is loaded, each rank's own."""
    out = tmp_path / "stripped"
    code, _, err = headline(r1, out, "--tp", "2", "--strip-weights")
    assert (code, err) == (0, "")
    assert len(list(out.glob(f"rank*/{WEIGHTS}"))) == 2
    (tmp_path / "own").mkdir()
    alone = one_rank(r1, NEXTN, tmp_path / "own")
    assert tokens(out, PROMPT) == greedy_text(alone, PROMPT, COUNT)


@pytest.mark.full
def test_eight_ranks(trt: FakeTensorRt, r1: Path, engine: Path, tmp_path: Path) -> None:
    """The headline command as it is said; then rank by rank, as on one GPU."""
    code, _, err = headline(r1, tmp_path / "eight", "--tp", "8")
    assert (code, err) == (0, "")
    (tmp_path / "own").mkdir()
    assert tokens(tmp_path / "eight", PROMPT) == greedy_text(
        one_rank(r1, NEXTN, tmp_path / "own"), PROMPT, COUNT
    )
    for rank in range(8):
        code, _, err = headline(r1, tmp_path / "apart", *APART, str(rank))
        assert (code, err) == (0, "")
        mine, other = (tmp_path / name / f"rank{rank}" for name in ("apart", "eight"))
        for path in mine.glob("*.engine"):
            assert path.read_bytes() == (other / path.name).read_bytes()
    assert headline(r1, tmp_path / "apart", "--tp", "8")[1].count("unchanged") == 1
