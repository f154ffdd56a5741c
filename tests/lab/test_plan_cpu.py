"""`mtpbuild plan --cpu`: sizes of engines that are built, bytes by hand, this machine, refusals."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.plan.context import MAPPED
from mtpbuild.builder.plan.machine import Disk, Machine, find_disk, measure_machine
from mtpbuild.builder.plan.recipe import load_recipes
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.weights.scheme import make_scheme
from mtpbuild.lab.forecast.cpu import CpuForecast, forecast_cpu
from mtpbuild.lab.forecast.forecast import ForecastRequest
from mtpbuild.lab.measure.host import measure_bandwidth
from mtpbuild.runtime.errors import BuildError, UsageError
from mtpbuild.runtime.ranks import ALONE
from tests.support.checkpoints import BASE, SMALLEST, random_checkpoint
from tests.support.forecasts import counted_once
from tests.support.invoke import invoke, refusal
from tests.support.requests import build_request, quantize

GIGACHAT = "gigachat3-10b-a1.8b-bf16"
SIZES = ("moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
EVEN = BASE | SMALLEST | {"vocab_size": 64, "intermediate_size": 64} | dict.fromkeys(SIZES, 32)


@pytest.fixture(scope="module", autouse=True)
def one_count() -> Iterator[None]:
    with counted_once():
        yield


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoints in the current folder, none in the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def machine(available: float = 24e9, downloads: float = 70e9, engines: float = 70e9) -> Machine:
    """Make a machine of two disks."""
    return Machine(25 * 10**9, int(available), Disk(1, int(downloads)), Disk(2, int(engines)))


def foretold(model: str | Path, *nextn: int, **flags: Any) -> CpuForecast:
    return forecast_cpu(ForecastRequest(str(model), nextn, bandwidth=20, **flags), machine())


def engine_sizes(f: CpuForecast) -> dict[str, int]:
    return {engine.weights or "none": engine.bytes for engine in f.engines}


@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_in_fp32_holds_every_parameter(tied: bool, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "model", **EVEN | {"tie_word_embeddings": tied})
    config = load_config(folder)
    with torch.device("meta"):
        model = find_family_of(config).make_model(config, ALONE)
    parameters = sum(weight.numel() for weight in model.parameters())
    if tied:  # the head's weight is the embedding, too
        parameters -= config.vocab_size * config.hidden_size
    assert engine_sizes(foretold(folder, 0))["none"] == 4 * parameters


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_a_quantised_checkpoint(format: str, tmp_path: Path) -> None:
    """Its engine has the size that a dry run finds: integers stay, the rest is fp32.

    Sizes fill the panels of our kernels; a forecast does not count what fills up others.
    """
    plain, folder = random_checkpoint(tmp_path / "plain", **EVEN), tmp_path / format
    quantize(QuantizeRequest(str(plain), make_scheme(format, None, None), folder))
    request = build_request(folder, nextn=(0,), out=tmp_path / "e")
    (found,) = dry_run(request, Stages()).engines
    sizes = engine_sizes(foretold(folder, 0))
    assert sizes["none"] == found.weight_file_bytes
    # Whatever the checkpoint is in, --weights says what the engine is in.
    assert sizes | {"none": 0} == engine_sizes(foretold(plain, 0)) | {"none": 0}
    E, V, modules = (EVEN[n] for n in ("hidden_size", "vocab_size", "num_nextn_predict_layers"))
    more = 2 * V * E + modules * 2 * E * E  # what --weights rounds, too
    smaller = sizes.get(format, found.weight_file_bytes)
    assert found.weight_file_bytes - smaller == (more * (64 - 17) // 16 if format in sizes else 0)


def test_gigachat_by_hand() -> None:
    """A value takes 4.5 bits in int4 and 8.5 in int8; latents and eh_proj are int8 with both."""
    E, H, V, r, layers = 1536, 32, 128256, 512, 27
    expert, ends = 3 * E * 1280, 2 * V * E
    products = layers * (E * H * 192 + H * 192 * E) + 26 * 65 * expert + 3 * E * 8960
    latents = layers * E * (r + 64)  # int8 with both, as the next two
    by_head = layers * r * H * 320
    join = 2 * E * E
    fine = latents + by_head + join + ends
    rest = layers * (r + 2 * E) + 26 * (64 * E + 64) + E + 3 * E
    sizes = engine_sizes(foretold(GIGACHAT, 1))
    assert sizes == {
        "none": 4 * (products + fine + rest),
        "int8": (products + fine) * 17 // 16 + 4 * rest,
        "int4": products * 9 // 16 + fine * 17 // 16 + 4 * rest,
    }
    assert sizes["int4"] / 1e9 == pytest.approx(6.527, abs=0.0005)


def test_a_step_by_hand() -> None:
    """Weights once per pass, of 64 experts those that some token chose, the head for each draft."""
    found = foretold(GIGACHAT, 0, 1, context_len=1000)
    E, H, V, r, expert = 1536, 32, 128256, 512, 3 * 1536 * 1280
    latent = E * H * 192 + E * (r + 64) + r * H * 320 + H * 192 * E + r
    layer = latent + 2 * E
    router = 64 * E + 64
    trunk = 26 * layer + E + V * E + 3 * E * 8960 + 25 * (router + expert)
    module = layer + router + expert + 3 * E + 2 * E * E + V * E
    chosen = {tokens: 64 * (1 - (60 / 64) ** tokens) for tokens in (1, 2)}
    none = trunk + 25 * chosen[1] * expert
    one = trunk + module + 26 * chosen[2] * expert
    rows = 1000 * 576
    wanted = [4 * (none + 26 * rows), 4 * (one + 27 * rows)]
    assert found.engines[0].reads == pytest.approx(wanted, rel=1e-12)


def test_few_experts_are_all_read() -> None:
    """deepseek-tiny computes its 8 experts, whichever of them are chosen."""
    found = foretold("deepseek-tiny", 0, context_len=1)
    config = load_config(Path(__file__).parents[2] / "recipes" / "deepseek_tiny")
    classes = [one for one in found.model.classes if not one.module and one.name != "embedding"]
    rows = sum(find_family_of(config).cache_widths(config, ALONE)[: config.num_hidden_layers])
    assert found.engines[0].reads == [sum(one.bytes for one in classes) + 4 * rows]


def test_memory_and_caches() -> None:
    found = foretold(GIGACHAT, 0, 1, 3, max_seq_len=1000, max_batch=2)
    for engine in found.engines:
        caches = [2 * 4 * 576 * n for n in (26 * 1001, 27 * 1002, 27 * 1004)]
        assert engine.memory == [round(MAPPED * engine.bytes) + cache for cache in caches]


def test_a_machine_whose_memory_is_too_small() -> None:
    """Memory holds what each step reads, and some experts; a disk brings the others, if it can."""
    flags: dict[str, Any] = {"memory": 4.0, "disk_bandwidth": 2.0, "context_len": 1000}
    found = foretold(GIGACHAT, 0, max_seq_len=999, **flags)
    engine, chosen = found.engines[2], 25 * 4 * 3 * 1536 * 1280 * 9 / 16
    caches = 4 * 576 * 26 * 1000
    room, always = 4e9 - caches, engine.reads[0] - chosen - caches
    missing = chosen * (1 - (room - always) / (16 * chosen))
    assert engine.missing == [pytest.approx(missing)]
    assert not engine.fits
    assert found.speeds(engine) == [pytest.approx(2e9 / missing)]
    none = foretold(GIGACHAT, 0, max_seq_len=999, **flags | {"memory": 0.5}).engines[2]
    assert none.missing == [pytest.approx(engine.reads[0] - caches - (0.5e9 - caches))]
    enough = foretold(GIGACHAT, 0, **flags | {"memory": 100.0})
    assert [one.missing for one in enough.engines] == [[0]] * 3
    assert enough.speeds(enough.engines[2]) == foretold(GIGACHAT, 0, context_len=1000).speeds(
        foretold(GIGACHAT, 0, context_len=1000).engines[2]
    )


@pytest.mark.full
def test_what_fits() -> None:
    request = ForecastRequest(GIGACHAT, (0, 1))
    verdicts = [engine.fits for engine in forecast_cpu(request, machine()).engines]
    assert verdicts == [False, True, True]
    enough = forecast_cpu(request, machine(available=1e12)).engines
    assert [engine.fits for engine in enough] == [True, True, True]
    little = forecast_cpu(request, machine(available=1e12, engines=8e9)).engines
    assert [engine.lacking > 0 for engine in little] == [True, True, False]
    none = forecast_cpu(request, machine(available=1e12, downloads=22e9)).engines
    assert {engine.lacking for engine in none} == {found_download() - 22 * 10**9}
    shared = Disk(1, 30 * 10**9)
    one = forecast_cpu(request, Machine(10**12, 10**12, shared, shared))
    wanted = [max(0, found_download() + engine.bytes - shared.free) for engine in one.engines]
    assert [engine.lacking for engine in one.engines] == wanted
    assert one.shares_disk


def found_download() -> int:
    return foretold(GIGACHAT, 0).download


def test_what_is_downloaded(smallest: Path, tmp_path: Path) -> None:
    assert found_download() == foretold(GIGACHAT, 0).checkpoint_bytes == 22_171_500_032
    assert foretold("glm-4.7-flash", 0).download == 2 * 31_221_488_576 + 2 * 47 * 64
    for here in (smallest, "deepseek-tiny", "deepseek-tiny-int4"):
        assert foretold(here, 0).download == 0
    place = tmp_path / "checkpoints" / GIGACHAT
    place.mkdir(parents=True)
    (place / "config.json").touch()
    assert foretold(GIGACHAT, 0).download == 0


def test_models_without_modules() -> None:
    assert foretold("moonlight-16b-a3b-instruct").request.nextn == (0,)
    assert foretold(GIGACHAT).request.nextn == (0, 1, 2, 3, 4, 5)
    with pytest.raises(BuildError, match="--nextn 1 needs an MTP module; this checkpoint has none"):
        foretold("moonlight-16b-a3b-instruct", 0, 1)
    code, out, _ = invoke("plan", "--model", "moonlight-16b-a3b-instruct", "--json")
    assert (code, json.loads(out)["nextn"]) == (0, [0])


def test_this_machine(tmp_path: Path) -> None:
    assert 1e8 < measure_bandwidth(passes=1) < 1e13
    found = measure_machine()
    assert 0 < found.available <= found.memory <= psutil.virtual_memory().total
    assert find_disk(tmp_path / "not" / "there").device == find_disk(tmp_path).device
    with pytest.raises(UsageError, match="meminfo, which this system lacks"):
        measure_machine(tmp_path)


def test_smaller_caches() -> None:
    """As `build --cache-dtype` makes them: for integer weights, in int8 with scales."""
    floats, ints = (foretold(GIGACHAT, 0, 1, cache_dtype=each) for each in ("auto", "int8"))
    assert [engine.weights for engine in ints.engines] == ["int8", "int4"]
    rows = [f.model.cache_bytes(1, f.request.cache_dtype) for f in (floats, ints)]
    assert rows == [27 * 576 * 4, 27 * (576 + 2 * 18)]
    memory = [f.engines[-1].memory[1] for f in (floats, ints)]
    assert memory[0] - memory[1] == (rows[0] - rows[1]) * (floats.request.max_seq_len + 2)
    reads = [f.engines[-1].reads[0] for f in (floats, ints)]
    assert reads[0] - reads[1] == pytest.approx(26 * 2048 * (576 * 4 - 612))
    stored = foretold("deepseek-tiny-int4", 0, cache_dtype="bfloat16")
    assert [engine.weights for engine in stored.engines] == [None, "int8", "int4"]
    with pytest.raises(UsageError, match=r"--cache-dtype int8: .* can't be int8: use bfloat16$"):
        foretold("glm-5", 0, cache_dtype="int8")


def test_json() -> None:
    code, out, err = invoke("plan", "--model", GIGACHAT, "--cpu", "--nextn", "0,1", "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    assert " ".join(sorted(found)) == (
        "acceptance_lengths bandwidth_bytes_per_s cache_dtype checkpoint_bytes context_len "
        "disk_free_bytes "
        "distinct_experts download_bytes engines "
        "kv_bytes kv_bytes_per_token max_batch max_seq_len memory_available_bytes memory_bytes "
        "model nextn portions target"
    )
    assert found["kv_bytes_per_token"] == [26 * 576 * 4, 27 * 576 * 4]
    assert found["kv_bytes"] == [26 * 576 * 4 * 4097, 27 * 576 * 4 * 4098]
    assert [engine["weights"] for engine in found["engines"]] == ["none", "int8", "int4"]
    assert all(len(engine["bytes_per_step"]) == 2 for engine in found["engines"])
    assert found["portions"][1] == {
        "name": "MTP layers",
        "parameters": 413_212_736,
        "bytes": 826_425_600,
    }


def test_tables(smallest: Path) -> None:
    code, out, err = invoke("plan", "--model", "glm-4.7-flash", "--cpu", "--nextn", "0..2")
    assert (code, err) == (0, "")
    assert "download: 62.44 GB to " in out
    assert all(f"\n{name} " in out for name in ("main model", "MTP layers", "copies in MTP layers"))
    assert "110,592 bytes per token (float32)" in out  # 48 x 576 x 4
    assert "of memory" in out
    code, out, err = invoke("plan", "--model", smallest, "--cpu")
    assert (code, err) == (0, "")
    assert "download: nothing" in out
    assert out.count(" yes ") == 3
    assert "copies" not in out


def test_speed_follows_from_bytes_and_bandwidth() -> None:
    """An engine that does not fit has none; --acceptance says how many tokens a step gives."""
    found = foretold(GIGACHAT, 0, 3, acceptance=(1.0, 2.5))
    for engine in found.engines:
        speeds = [1.0 * 20e9 / engine.reads[0], 2.5 * 20e9 / engine.reads[1]]
        assert found.speeds(engine) == (speeds if engine.fits else [None, None])
    assert [engine.fits for engine in found.engines] == [False, True, True]
    flags = ("--nextn", "0,3", "--acceptance", "1,2.5", "--bandwidth", "20")
    code, out, err = invoke("plan", "--model", GIGACHAT, "--cpu", *flags)
    assert (code, err) == (0, "")
    assert "at 20 GB/s (given)" in out


@pytest.mark.full
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_plan_needs_no_torch(every: bool, tmp_path: Path) -> None:
    """For each layout of a family's recipes, and for a folder with weights: a process with none."""
    recipes = sorted(load_recipes(), key=lambda recipe: -(recipe.download or 0))
    kinds: Sequence[object] = [recipe.config for recipe in recipes]
    if not every:
        kinds = [(find_family_of(load_config(r.config_folder)).name, r.layout) for r in recipes]
    models = {kind: r.name for kind, r in zip(kinds, recipes, strict=True)}  # the smallest ones
    folder = random_checkpoint(tmp_path / "model", **EVEN)
    plans = [["plan", "--cpu", "--model", m, "--json"] for m in (*models.values(), str(folder))]
    plans.append(["plan", "--model", "deepseek-r1-fp4", "--tp", "8"])
    code = f"""
import sys
sys.modules.update(dict.fromkeys(("torch", "onnx", "onnxscript", "onnx_ir", "onnxruntime")))
from mtpbuild.builder.cli import app
for plan in {plans}:
    app(plan, standalone_mode=False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"tokens_per_s"') == 3 * (len(models) + 1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--gpu b200", "--cpu does not go with --gpu: they are for plans of GPUs"),
        ("--tp 1 --ep 1 --attention-dp", "--cpu does not go with --tp, --ep, --attention-dp: "),
        ("--prefill-chunk 64", "does not go with --prefill-chunk: "),
        ("--cache-dtype fp8", "--cache-dtype fp8 is unknown; supported: float32, bfloat16, int8"),
        ("--bandwidth 0", "--bandwidth 0 must be above 0"),
        ("--memory 0", "--memory 0 must be above 0"),
        ("--memory 9 --disk-bandwidth 0", "--disk-bandwidth 0 must be above 0"),
        ("--measured 0=1,1=2", "does not go with --measured: "),
        ("--picture x.png", "does not go with --picture: "),
        ("--max-seq-len 0", "--max-seq-len 0 must be at least 1"),
        ("--nextn 16", "--nextn 16 is outside 0..15"),
    ],
)
def test_refusals(flags: str, says: str) -> None:
    assert says in refusal("plan", "--model", GIGACHAT, "--cpu", *flags.split())


def test_a_repository_that_is_not_here() -> None:
    says = refusal("plan", "--model", "some/model", "--cpu", code=1)
    assert "some/model is neither a folder nor downloaded here: unset it, or" in says
