"""CUDA programs compiled without a GPU: cubins, calls, a library that is linked; nothing is loaded.

Each compilation is a process of its own, because Triton's interpreter must be off.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mtpbuild.builder.overrides import override_attribute
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.targets.capability import GPUS
from mtpbuild.builder.targets.inductor import Inductor, cross_cuda, lowering
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import BuildError, MissingDependencyError, advise_install
from tests.support.checkpoints import make_model
from tests.support.compiler import needs_compiler
from tests.support.cross_compile import Compiled
from tests.support.invoke import invoke
from tests.support.run_command import call

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")

# What a part of R1 calls with 4 tokens, at most, the collectives apart: more are a step backwards.
# Of a rank of eight, in bfloat16, in nvfp4 and in fp8.
MAX_CALLS = {
    "dense_layer": (14, 16, 17),
    "MoE_layer": (17, 17, 18),
    "first_draft": (25, 25, 26),
    "head": (3, 3, 3),
}
FORMATS = ("", "nvfp4", "fp8")
# The same inside a step with nextn 3: what one more dense layer adds and one more MoE layer, what a
# step with one of each calls, and one of all 61 layers.
OF_A_STEP = {"": (12, 15, 120, 999), "nvfp4": (14, 15, 122, 1005), "fp8": (15, 16, 127, 1069)}
ATTENTION = {"latent_row", "absorbed_query", "mla_partial", "mla_combine", "value_of_head"}
CHOICE = {"score_rows", "best_rows"}
EXPERTS = {"route", "gate_and_up", "down"}
OWN = {
    "dense_layer": ATTENTION,
    "MoE_layer": ATTENTION | EXPERTS,
    "first_draft": ATTENTION | EXPERTS,
    "head": {"scaled_product"},
}
OTHER_WORKER = pytest.mark.xdist_group("cross_cuda_steps")  # half of this file's minutes
CUDA_LIBRARIES = {"libcuda.so.1", "libtorch_cuda.so"}


@pytest.fixture(scope="session")
def headers() -> Path:
    try:
        return cross_cuda.headers()
    except MissingDependencyError as error:
        pytest.skip(str(error))


def compiled(folder: Path, *cases: str, flags: Sequence[str] = ("-W", "ignore")) -> list[Compiled]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"TORCH_LOGS": "-all", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, *flags, "-m", "tests.support.cross_compile", str(folder)]
    done = subprocess.run(
        [*command, *cases], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Exception" not in done.stderr, "nothing is unloaded from a GPU at the end"
    assert "Warning" not in done.stderr, "a user sees none that is torch's own"
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def check(program: Compiled, architecture: str, headers: Path) -> None:
    """Cubins for that GPU, host code for any AVX2 CPU, nothing undefined but CUDA's functions."""
    assert set(program.architectures) == {architecture}
    assert program.architectures[architecture] >= len(program.kernels) > 0
    assert program.isa == "AVX2"
    assert set(program.needed) > CUDA_LIBRARIES
    declared = (headers / "cuda.h").read_text() + (headers / "cuda_runtime_api.h").read_text()
    for name in program.unresolved:
        ours = re.fullmatch(r"aoti_torch_(cuda_\w+|\w+_cuda_\w+)", name)
        assert ours or re.search(rf"\b{name}\b", declared), name
    assert {"cuLaunchKernel", "cuModuleLoad", "cudaGetDevice"} <= set(program.unresolved)


@pytest.mark.full
@needs_compiler
def test_kernels_without_a_gpu(headers: Path, tmp_path: Path) -> None:
    """The host's code is written, and not compiled: acceptance is our kernels, and no branch."""
    (program,) = compiled(tmp_path, "--kernels-only", "small/acceptance/sm90/bfloat16")
    assert set(program.architectures) == {"sm_90"}
    assert {"best_of_block", "verdict_of_slot"} <= set(program.fresh)
    assert sum(program.kernels.values()) == program.architectures["sm_90"]


@pytest.mark.full
@pytest.mark.parametrize("gpu", ["sm90", pytest.param("sm80", marks=pytest.mark.full)])
def test_a_layer_that_chooses_rows(gpu: str, headers: Path, tmp_path: Path) -> None:
    (program,) = compiled(tmp_path, "--kernels-only", f"small-sparse/dense layer/{gpu}/bfloat16")
    assert CHOICE | (ATTENTION - {"mla_combine"}) <= set(program.fresh), "one split of 32 rows"
    assert sum(program.kernels.values()) == program.architectures[gpu.replace("sm", "sm_")]


@pytest.mark.full
@pytest.mark.parametrize(("model", "gpu"), [("v3.2", "sm90"), ("v3.2", "sm100"), ("glm-5", "sm90")])
def test_a_step_that_chooses_rows(model: str, gpu: str, headers: Path, tmp_path: Path) -> None:
    """A rank of eight, nextn 3: two layers and the module's first draft choose, later ones too."""
    (program,) = compiled(tmp_path, f"{model}/step of 1+1/{gpu}/bfloat16")
    check(program, gpu.replace("sm", "sm_"), headers)
    assert program.kernels["score_rows"] == program.kernels["best_rows"] == 5
    assert program.kernels["mla_partial"] == program.kernels["mla_combine"] == 5
    assert not [name for name in program.kernels if name.startswith("clone")]


@pytest.mark.full
def test_a_step_of_deepseek_v4(headers: Path, tmp_path: Path) -> None:
    """Three layers and three drafts: each attends to listed rows, and mixes streams twice."""
    (program,) = compiled(tmp_path, "--kernels-only", "small-v4/step/sm90/bfloat16")
    counts = {name: program.kernels[name] for name in ("mla_partial", "mla_combine", "balance")}
    assert counts == {"mla_partial": 6, "mla_combine": 6, "balance": 12}
    assert program.kernels["score_rows"] == program.kernels["best_rows"] == 2
    assert program.kernels["gate_and_up"] == program.kernels["down"] == 6
    assert program.kernels["route"] == 5, "one layer's tokens choose"
    assert not [name for name in program.kernels if re.search(r"(?<!_to)_copy_", name)]


@pytest.mark.full
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gpu", ["sm90", "sm100"])
def test_a_rank_of_eight_of_r1(gpu: str, format: str, headers: Path, tmp_path: Path) -> None:
    parts = "dense layer,MoE layer,first draft" + ("" if format == "nvfp4" else ",head")
    output = f" in {format}" if format else ""
    programs = compiled(tmp_path, f"r1/{parts}{output}/{gpu}/bfloat16")
    assert [p.program for p in programs] == [name.replace(" ", "_") for name in parts.split(",")]
    for program in programs:
        check(program, gpu.replace("sm", "sm_"), headers)
        assert OWN[program.program] <= set(program.kernels)
        assert "scaled_product" in program.kernels, "plain products, too, whose reader sums parts"
        assert program.calls <= MAX_CALLS[program.program][FORMATS.index(format)]


@pytest.mark.full
@OTHER_WORKER
@pytest.mark.parametrize("format", FORMATS)
def test_calls_of_a_step(format: str, headers: Path, tmp_path: Path) -> None:
    """A rank of eight of R1, nextn 3: what layers add to a step."""
    steps = "step of 1+1,step of 2+1,step of 1+2" + (f" in {format}" if format else "")
    one, dense, moe = compiled(tmp_path, "--kernels-only", f"r1/{steps}/sm90/bfloat16")
    layers = dense.calls - one.calls, moe.calls - one.calls
    step = one.calls + 2 * layers[0] + 57 * layers[1]  # 3 dense layers and 58
    for calls, most in zip((*layers, one.calls, step), OF_A_STEP[format], strict=True):
        assert calls <= most
    for more in (dense, moe):
        assert more.collectives == one.collectives + 2
    assert not [name for name in one.kernels if "kv_write" in name or "clone" in name]


@pytest.mark.full
@OTHER_WORKER
def test_calls_of_a_mixed_step(headers: Path, tmp_path: Path) -> None:
    """Filters cost 12 launches for the window and for each draft, used or not."""
    (program,) = compiled(tmp_path, "--kernels-only", "r1/mixed step of 1+1/sm90/bfloat16")
    judge = {"law_of_row", "rest_of_block", "draw_of_row", "verdict_of_mixed_slot", "shape_block"}
    assert judge <= set(program.kernels)
    assert program.kernels["try_thresholds"] == 4 * 12
    assert program.calls <= 198


@pytest.mark.full
@pytest.mark.parametrize("gpu", ["sm80", "sm90", "sm100", "sm120"])
def test_kernels_are_compiled_once(gpu: str, headers: Path, tmp_path: Path) -> None:
    """Programs of an engine share them; both have the same attention."""
    first, second = compiled(tmp_path, f"small/dense layer,MoE layer/{gpu}/bfloat16")
    for program in (first, second):
        check(program, gpu.replace("sm", "sm_"), headers)
    assert "mla_partial" in first.fresh
    assert not first.known
    assert "mla_partial" in second.known
    assert "mla_partial" not in second.fresh


@pytest.mark.full
def test_a_rank_of_two(headers: Path, tmp_path: Path) -> None:
    """Collectives are called from the host's code."""
    (program,) = compiled(tmp_path, "rank//sm90/bfloat16")
    check(program, "sm_90", headers)
    assert any("all_reduce" in name for name in program.operators)


@pytest.mark.full
def test_one_shot_sums(headers: Path, tmp_path: Path) -> None:
    """Each is a launch in a collective's place, in a whole program and in R1's rank of eight."""
    (program,) = compiled(tmp_path, "rank//sm90/bfloat16/one-shot")
    check(program, "sm_90", headers)
    assert not any("c10d" in name for name in program.operators)
    assert program.kernels["add_in_order"] == 19
    step, rest = "r1/step of 1+1/sm100/bfloat16", tmp_path / "r1"
    rest.mkdir()
    own, other = compiled(rest, "--kernels-only", f"{step}/one-shot", step)
    assert own.kernels["add_in_order"] == other.collectives == 21
    assert own.calls == other.calls + 21


@pytest.mark.full
@OTHER_WORKER
@pytest.mark.parametrize(("gpu", "dtype"), [("sm90", "float32"), ("sm100", "bfloat16")])
def test_deepseek_tiny(gpu: str, dtype: str, headers: Path, tmp_path: Path) -> None:
    programs = compiled(tmp_path, f"deepseek-tiny//{gpu}/{dtype}", flags=())
    assert [program.program for program in programs] == ["prefill", "decode", "decode_mixed"]
    for program in programs:
        check(program, gpu.replace("sm", "sm_"), headers)
    for name in ("mla_partial", "mla_combine"):  # for a window, and for a draft's one token
        assert (programs[0].fresh.count(name), programs[0].known.count(name)) == (2, 2)
    manifest = read_manifest(tmp_path / "deepseek-tiny")
    cross = manifest.target.cross_compiled
    assert cross is not None
    assert cross.architecture == gpu.replace("sm", "sm_")
    shown = " ".join(call("inspect", tmp_path / "deepseek-tiny").stdout.split())
    assert "not loaded yet" in shown


def test_what_the_manifest_says(
    smallest: Path,
    quick_inductor: None,
    headers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    engine = tmp_path / "engine"
    asked = ("--target", "inductor", "--device", "cuda", "--compute-capability", "sm_100")
    out = ("--out", engine, "--nextn", "1")
    code, _, output = invoke("build", "--model", smallest, *asked, *out)
    assert (code, output.count("error")) == (0, 0)
    target = read_manifest(engine).target
    assert target.compute_capabilities == ("10.0",)
    assert target.cross_compiled is not None
    assert target.cross_compiled.architecture == "sm_100"
    assert "B200" in target.cross_compiled.assumed
    assert any("autotuning" in part for part in target.cross_compiled.left_out)
    shown = call("inspect", engine).stdout
    assert "cross-compiled" in shown


def plan(capability: str | None) -> Plan:
    config = make_model(num_hidden_layers=1, num_nextn_predict_layers=1).config
    return Plan(
        config,
        *(1, "mtp-eagle", 1, 64, 8),
        Inductor("cuda", "bfloat16", capability).style,
        compute_capabilities=("9.0",),
    )


@needs_compiler
def test_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(cross_cuda, "find_spec", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(MissingDependencyError, match=re.escape(advise_install("cross-cuda"))):
        lowering.check(plan("sm90"), crosses=True)
    lowering.check(plan(None), crosses=False)  # a GPU's own build asks torch for its headers
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for name in cross_cuda.HEADERS:
        (tmp_path / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "include" / name).touch()
    with pytest.raises(BuildError, match="TRITON_INTERPRET=1"):
        lowering.check(plan("sm90"), crosses=True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    lowering.check(plan("sm90"), crosses=True)


def test_this_torch_asks_by_these_names(tmp_path: Path) -> None:
    """A name that is gone would be answered to nobody; some are in PyTorch with CUDA alone."""
    with_cuda = {"_cuda_getCurrentRawStream", "_empty_strided_cuda"}
    answers = list(cross_cuda._list_answers(GPUS["9.0"], "9.0", tmp_path))
    assert len(answers) > 25
    absent = {name for owner, name, _ in answers if not hasattr(owner, name)}
    assert absent <= with_cuda


def test_what_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes that were there, static methods, and those that were not."""

    class Owner:
        present = 1

        @staticmethod
        def asked() -> str:
            return "real"

    with (
        override_attribute(Owner, "present", 2),
        override_attribute(Owner, "asked", staticmethod(lambda: "pretended")),
        override_attribute(Owner, "absent", 3),
    ):
        assert (Owner.present, Owner.asked(), Owner.absent) == (2, "pretended", 3)  # type: ignore[attr-defined]
    assert (Owner.present, Owner.asked()) == (1, "real")
    assert Owner().asked() == "real", "still static"
    assert not hasattr(Owner, "absent")
