"""The target of a model for GPUs if none is named, and number formats that a GPU lacks."""

from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.compiler.plans import Plans
from mtpbuild.builder.plan.recipe import FoundModel, find_recipe_folder
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.targets import choice
from mtpbuild.builder.targets.choice import choose_target
from mtpbuild.builder.targets.tensorrt import TensorRt, lowering
from mtpbuild.runtime.errors import BuildError, UsageError
from mtpbuild.runtime.ranks import Ranks
from tests.support.fake_target import quick_target
from tests.support.invoke import invoke
from tests.support.requests import plan_model

R1 = "deepseek-r1-fp4"
CUDA = {"device": "cuda", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("here", "options", "missing", "target", "built_with", "says"),
    [
        ("10.0", {}, [], "tensorrt", {}, "GPUs of 10.0 have its formats"),
        ("12.0", {"strip_weights": True}, [], "tensorrt", {"strip_weights": True}, "GPUs of 12.0"),
        ("10.0", {"compute_capability": "sm100"}, [], "tensorrt", {}, "GPUs of 10.0"),
        ("10.0", {}, ["no package"], "inductor", CUDA, "not tensorrt: no package"),
        ("9.0", {}, [], "inductor", CUDA, "nvfp4 needs compute capability 10.0 or later in Tens"),
        ("9.0", {"dtype": "float32"}, [], "inductor", CUDA | {"dtype": "float32"}, "GPU has 9.0"),
        (
            None,
            {"compute_capability": "sm90"},
            [],
            "inductor",
            CUDA | {"compute_capability": "sm90"},
            "and the GPU has 9.0",
        ),
        (
            "9.0",
            {"compute_capability": "sm100"},
            [],
            "inductor",
            CUDA | {"compute_capability": "sm100"},
            "it compiles on the GPU itself, and none of 10.0 is here",
        ),
        (None, {}, ["no package"], "tensorrt", {}, None),
    ],
)
def test_what_the_machine_decides(
    here: str | None,
    options: dict[str, Any],
    missing: list[str],
    target: str,
    built_with: dict[str, Any],
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU nothing is decided: target tensorrt refuses, or a dry run assumes one."""
    monkeypatch.setattr(choice, "find_capability", lambda: here)
    monkeypatch.setattr(lowering, "list_missing_packages", lambda: iter(missing))
    chosen, given, why = choose_target(R1, options)
    assert (chosen, given) == (target, built_with)
    assert (why is None) if says is None else (says in str(why))


def test_who_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other models, ranks that are built apart, and a machine without a GPU."""
    assert choice.find_capability() is None
    assert choose_target("deepseek-tiny", {}, 1) == ("onnxruntime", {}, None)
    with pytest.raises(UsageError, match=r"^--rank 0: name the --target, tensorrt or inductor: "):
        choose_target(R1, {}, rank=0)


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("capability", "format", "least"),
    [
        ("9.0", "nvfp4", "10.0"),
        ("8.9", "nvfp4", "10.0"),
        ("8.0", "fp8", "8.9"),
        ("9.0", "fp8", None),
        ("10.0", "nvfp4", None),
        ("12.1", "nvfp4", None),
    ],
)
def test_formats_that_a_gpu_lacks(
    capability: str,
    format: str,
    least: str | None,
    more: tuple[str, ...],
    smallest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TensorRT is told before anything is read; target inductor decodes both formats."""
    monkeypatch.setattr(TensorRt, "compute_capabilities", lambda *given: (capability,))
    monkeypatch.setattr(Plans, "open_model", read)
    flags = ("build", "--model", smallest, "--nextn", "0", "--out", tmp_path / "e", *more)
    with quick_target("tensorrt", check_machine=lambda plan: None, list_missing=lambda plan: ()):
        code, _, err = invoke(*flags, "--target", "tensorrt", "--weights", format)
    assert code == 1
    says = f"{format} needs compute capability {least} or later in TensorRT, and the GPU has "
    assert (says + capability in err) == (least is not None)
    assert ("build with `--target inductor --device cuda" in err) == (least is not None)
    assert ("the checkpoint is read" in err) == (least is None)


def read(*given: object, **more: object) -> None:
    raise BuildError("the checkpoint is read")


@pytest.mark.parametrize(("gpu", "said"), [("h200", True), ("h100", True), ("b200", False)])
def test_a_plan_says_so(gpu: str, said: bool) -> None:
    code, out, _ = invoke("plan", "--model", R1, "--gpu", gpu, "--tp", "8", "--nextn", "3")
    assert code == 0
    assert ("target tensorrt builds no such engine: nvfp4 needs compute" in out) == said


def test_the_folder_names_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So engines of both targets stand side by side."""
    monkeypatch.chdir(tmp_path)
    for target, options in (("inductor", {"compute_capability": "sm90"}), ("tensorrt", {})):
        given = (CUDA if target == "inductor" else {}) | options
        request = BuildRequest(R1, (3,), target=target, ranks=Ranks(8), options=given)
        config = find_recipe_folder() / "deepseek_v3"
        model = FoundModel(R1, "r1", config)
        (folder,) = plan_model(request, model)
        assert folder == Path(f"engines/r1_n3_{target}_bf16_tp8")
