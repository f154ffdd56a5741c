"""Weights in formats that target onnxruntime can't keep: int8, and a line says the loss."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtpbuild.builder.compiler.notes import describe_formats, list_notes
from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.formats.integers import INT8
from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.builder.program.opened_model import OpenedModel
from mtpbuild.builder.targets.onnxruntime.pipeline import CPU
from mtpbuild.builder.weights.scheme import IN_FLOATS, SCHEMES
from mtpbuild.lab.verify import verify
from mtpbuild.lab.verify.plain import judge_texts, load_plain
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest
from mtpbuild.runtime.errors import UsageError
from tests.support.checkpoints import QUANTIZABLE, SMALLEST, make_predictable, save_checkpoint
from tests.support.gguf_files import WIDE, write_hybrid
from tests.support.invoke import invoke
from tests.support.numbers import check_rounded, in_int8_blocks, played
from tests.support.opened import opened
from tests.support.other_formats import WRITTEN
from tests.support.requests import build, build_request, quantize

PROMPTS = [[5, 17, 3], [40, 2], [9, 9, 33, 21, 60]]
LIMITS: dict[str, Any] = {"max_seq_len": 64, "prefill_chunk": 8}
SMALL = QUANTIZABLE | SMALLEST


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("rounded")
    found = {"bf16": save_checkpoint(place / "bf16", make_predictable(**SMALL), **SMALL)}
    for name in ("fp8", "nvfp4"):
        found[name] = place / name
        quantize(QuantizeRequest(str(found["bf16"]), SCHEMES[name], place / name))
        found[f"{name}-int8"] = place / f"{name}-int8"
        quantize(QuantizeRequest(str(place / name), SCHEMES["int8"], found[f"{name}-int8"]))
    return found


def source(folder: Path, **how: Any) -> OpenedModel:
    return opened(folder, formats=("int8", "int4"), rounds_to="int8", pipeline=CPU, **how)


def rounded_as_kernels_do(folder: Path) -> PlainLM:
    """Return the dequantised model with products in int8, whose inputs are rounded to int8, too."""
    model = load_plain(folder)
    for stored in source(folder).rounded():
        module = model.get_submodule(stored.removesuffix(".weight"))
        weight = module.get_parameter("weight")
        weight.data = INT8.decode(INT8.encode(weight.data))
        module.register_forward_pre_hook(lambda _, given: (in_int8_blocks(given[0]),))
    return model


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_the_weights_and_the_loss(
    name: str, folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, wanted = source(folders[name]), source(folders[f"{name}-int8"])
    products = model.table.formats
    assert products.keys() <= wanted.table.formats.keys()
    assert (products.keys() == wanted.table.formats.keys()) == (name == "fp8")
    assert set(products.values()) == {INT8}
    for each, place in ((model, "ours"), (wanted, "theirs")):
        (tmp_path / place).mkdir()
        EngineWeights(each).write(tmp_path / place, None)
    ours, theirs = (load_file(tmp_path / place / WEIGHTS) for place in ("ours", "theirs"))
    for weight in products:
        for part in (f"{weight}.values", f"{weight}.scales"):
            assert torch.equal(ours[part], theirs[part]), part
    changes = squares = 0.0
    for stored in model.rounded():
        value = model.stored.read(stored)
        changes += (INT8.decode(INT8.encode(value)) - value).double().square().sum().item()
        squares += value.double().square().sum().item()
    line = next(line for line in caplog.messages if "are rounded to" in line)
    counts = f"({len(model.rounded())} in {name})"
    loss = f"relative error {(changes / squares) ** 0.5:.2%}"
    assert line == f"note: quantised weights {counts} are rounded to int8, {loss}"
    assert 0.003 < (changes / squares) ** 0.5 < 0.02


def test_what_stays_in_floats(folders: dict[str, Path]) -> None:
    """Weights that nobody has quantised, and all weights if the build is told so."""
    plain, floats = source(folders["bf16"]), source(folders["fp8"], scheme=IN_FLOATS)
    for model in (plain, floats):
        assert not model.table.formats
        assert not model.rounded()
    assert [*list_notes(plain)] == []
    assert "in fp8) are dequantised: the engine holds them in float32" in next(list_notes(floats))
    assert opened(folders["fp8"], formats=("fp8",), scheme=IN_FLOATS).weights_type == "float32"


@pytest.mark.parametrize("kind", ["Q5_K", "Q6_K", "IQ4_XS", "Q5_1"])
def test_gguf(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the types of the file; routers and the delta rule's exponents stay floats."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_hybrid(tmp_path / "a.gguf", kind, **WIDE)
    model = source(find_model(str(path)).folder)
    assert set(model.rounded().values()) == {kind.lower()}
    assert model.table.formats["layers.0.mlp.down_proj"] is INT8
    assert model.table.formats["embed_tokens"] is INT8
    assert f"trunk {kind.lower()}, held in int8" in describe_formats(model)
    assert not any("in_proj_a" in name or "in_proj_b" in name for name in model.rounded())
    (tmp_path / "e").mkdir()
    EngineWeights(model).write(tmp_path / "e", None)
    assert {*model.checkpoint.losses} == {*model.rounded()}


def test_small_products_stay_floats(tmp_path: Path) -> None:
    """A delta rule's exponents depend on their inputs' last digits; MLX quantises them, too."""
    model = source(WRITTEN / "mlx_qwen", drafts=False)
    assert model.table.formats["layers.0.linear_attn.in_proj"] is INT8
    assert "layers.0.linear_attn.in_proj_ba" not in model.table.formats
    assert model.dequantised()["mlx nvfp4"] == 2


def test_an_engine(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is int8 by default, says so in one line, and can be refitted; floats are a choice."""
    (built,) = build(build_request(folders["fp8"], (1,), out=tmp_path / "e", **LIMITS))
    assert (built.manifest.build.weights, built.manifest.build.quantised_to) == ("int8", None)
    assert built.manifest.build.exact
    assert sum("are rounded to" in line for line in caplog.messages) == 1
    check_rounded(rounded_as_kernels_do(folders["fp8"]), PROMPTS, played(built.folder, PROMPTS))
    _, again = refit(built.folder, str(folders["fp8"]))
    assert again.files[WEIGHTS].sha256 == built.manifest.files[WEIGHTS].sha256
    with pytest.raises(UsageError, match="weights int8 -> float32"):
        refit(built.folder, str(folders["bf16"]))


@pytest.mark.full
def test_an_engine_in_floats(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--weights floats` is in the manifest, so `refit` and `verify` hold floats, too."""
    monkeypatch.chdir(tmp_path)
    (built,) = build(build_request(folders["fp8"], (1,), weights="floats", **LIMITS))
    assert built.folder.name == "fp8_n1_floats"
    assert built.manifest.build.weights == "float32"
    assert built.manifest.build.quantised_to == "floats"
    _, again = refit(built.folder, str(folders["fp8"]))
    assert again.files[WEIGHTS].sha256 == built.manifest.files[WEIGHTS].sha256
    request = verify.VerifyRequest(built.folder, model=str(folders["fp8"]))
    baseline = verify.find_baseline(request, built.manifest, print)
    assert read_manifest(baseline).build.weights == "float32"
    output = played(built.folder, PROMPTS)
    assert judge_texts(load_plain(folders["fp8"], scheme=IN_FLOATS), PROMPTS, output).passed


def test_a_dry_run(folders: dict[str, Path], tmp_path: Path) -> None:
    flags = ("build", "--model", folders["fp8"], "--nextn", "0", "--dry-run")
    code, out, err = invoke(*flags, "--out", tmp_path / "e")
    assert (code, err) == (0, "")
    assert re.search(r"\d+ in fp8 would be rounded to int8", out)
    assert "GB int8" in out
    code, out, err = invoke(*flags, "--out", tmp_path / "e", "--weights", "floats")
    assert (code, err) == (0, "")
    assert "would be rounded" not in out
    assert "GB float32" in out
