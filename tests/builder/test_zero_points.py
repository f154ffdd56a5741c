"""Integers with zero points stay as they are: in the model, in the weights file, in an engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import SINGLE
from mtpbuild.builder.compiler.notes import describe_formats, list_notes
from mtpbuild.builder.formats.integers import INT4, INT8, MOVED, Integers, join_integers
from mtpbuild.builder.models.common.blocks import PackedBlocks, PackedExperts
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.builder.program.opened_model import OpenedModel
from mtpbuild.builder.targets.onnxruntime.pipeline import CPU
from mtpbuild.builder.weights.scheme import SCHEMES
from mtpbuild.lab.measure.checks import ROUNDED
from mtpbuild.lab.verify.plain import judge_texts
from mtpbuild.plugins.product_packed.op import unpacked
from mtpbuild.runtime.contract.manifest import WEIGHTS
from tests.support.checkpoints import QUANTIZABLE, load_config, make_predictable, save_checkpoint
from tests.support.gguf_files import WIDE, write_hybrid
from tests.support.numbers import check_rounded, plain_with_rounding, played
from tests.support.opened import load_model, opened
from tests.support.other_formats import WRITTEN, pack_words
from tests.support.requests import build, build_request

SHAPE = QUANTIZABLE | {"qk_rope_head_dim": 8}  # numbers of outputs fill words
MANY = SHAPE | {"n_routed_experts": 24, "num_experts_per_tok": 3}  # chosen ones are gathered
PROMPTS = [[5, 17, 3], [40, 2], [9, 9, 33, 21, 30]]


def as_gptq(plain: Path, folder: Path, group: int) -> Path:
    """Write products with the smallest number of a group as 0, the largest as 15."""
    config, tensors = load_config(plain), load_file(plain / SINGLE)
    for name, weight in [*tensors.items()]:
        if SCHEMES["int4"].wanted(config, name) is None:
            continue
        groups = weight.float().unflatten(1, (-1, group))
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=1e-6).half()
        zeros = (-low / scales.float()).round().clamp(1, 15)
        codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
        del tensors[name]
        at = name.removesuffix("weight")
        tensors[f"{at}qweight"] = pack_words(codes.clamp(0, 15).flatten(1).T, 4, 0)
        tensors[f"{at}qzeros"] = pack_words(zeros.T - 1, 4, 1)
        tensors[f"{at}scales"] = scales.T.contiguous()
    raw = json.loads((plain / "config.json").read_text())
    output = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": False}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": output}))
    save_file(tensors, folder / SINGLE)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    place, found = tmp_path_factory.mktemp("zeros"), {"awq": WRITTEN / "autoawq"}
    for name, shape in (("gptq", SHAPE), ("many", MANY)):
        plain = save_checkpoint(place / f"{name}-plain", make_predictable(**shape), **shape)
        found[name] = as_gptq(plain, place / name, 32)
    return found


def held_products(model: OpenedModel, place: Path) -> Iterator[tuple[Integers, Tensor, Tensor]]:
    """Yield each product that stays in integers: its format, what an engine holds, and the file."""
    EngineWeights(model).write(place, siblings=None)
    model.model.load_state_dict(load_file(place / WEIGHTS), assign=True)
    whole = load_model(model.source.folder, model.config)
    for weight, format in model.table.formats.items():
        module, wanted = model.model.get_submodule(weight), whole.get_parameter(weight)
        assert isinstance(format, Integers)
        if not isinstance(module, PackedBlocks | PackedExperts):
            continue  # rows that are looked up
        held = unpacked(module.values, module.scales, module.outputs).mT
        if weight.endswith("gate_up_proj") and isinstance(module, PackedExperts):
            gates, ups = held.unflatten(-1, (-1, 2, 32)).unbind(-2)
            held = torch.cat([gates.flatten(-2), ups.flatten(-2)], dim=-1)
        yield format, held, wanted


@pytest.mark.parametrize(
    "name", ["awq", *(pytest.param(n, marks=pytest.mark.full) for n in ("gptq", "many"))]
)
def test_the_weights(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Joined, permuted and packed, all that is kept equals the values of the file."""
    model = opened(folders[name], formats=("int8", "int4"), pipeline=CPU, rounds_to=None)
    for format, held, wanted in held_products(model, tmp_path):
        assert format.offsets == "zeros"
        assert torch.equal(held, wanted)
    assert "held in int4" in describe_formats(model)
    assert [*list_notes(model)] == []


def test_products_of_several_formats() -> None:
    for formats, fours, kept in (
        ((MOVED[4], INT4), (32, 32), MOVED[4]),
        ((INT8, MOVED[8]), (32, 32), MOVED[8]),
        ((INT4, MOVED[8]), (16, 32), MOVED[8]),
        ((MOVED[8], INT4), (32, 32), MOVED[8]),
        ((INT4, INT8), (16, 32), INT8),
    ):
        assert join_integers(formats, fours) is kept
    both = join_integers((MOVED[4], INT8), (32, 64))
    assert (both.bits, both.offsets) == (4, "zeros")
    # int4 among int8 keeps its zeros, and what has none gets them.
    weight = torch.randn(32, 64)
    for format in (INT4, MOVED[4]):
        parts = format.encode(weight)
        wide = {suffix: MOVED[8].rows(suffix, part, (32, 64), 32) for suffix, part in parts.items()}
        assert torch.equal(MOVED[8].decode(wide), format.decode(parts))


@pytest.mark.parametrize("kind", ["Q4_1", pytest.param("Q4_K", marks=pytest.mark.full)])
def test_minima_of_gguf(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Products stay int4; an engine says what the plain model says with inputs in int8."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_hybrid(tmp_path / "a.gguf", kind, **WIDE)
    folder = find_model(str(path)).folder
    model = opened(folder, formats=("int8", "int4"), rounds_to="int8", pipeline=CPU)
    assert model.table.formats["embed_tokens"] is INT8
    close = {"rtol": 0, "atol": 0} if kind == "Q4_1" else {"rtol": 2e-3, "atol": 1e-3}
    (tmp_path / "w").mkdir()
    for format, held, wanted in held_products(model, tmp_path / "w"):
        assert format.offsets == "minima"
        torch.testing.assert_close(held, wanted, **close)
    (line,) = (line for line in caplog.messages if "are rounded to" in line)
    assert line.startswith(f"note: quantised weights (1 in {kind.lower()}) are rounded to int8")
    assert ("rounded to fp16 scales and minima, relative error 0.0" in line) == (kind == "Q4_K")
    (built,) = build(build_request(path, (0,), max_seq_len=64, out=tmp_path / "e"))
    assert (built.manifest.build.weights, built.manifest.build.exact) == ("int4", True)
    plain = plain_with_rounding(folder)
    rows = plain.get_parameter("model.embed_tokens.weight")
    rows.data = INT8.decode(INT8.encode(rows.data)).view_as(rows)
    judged = judge_texts(plain, PROMPTS, played(built.folder, PROMPTS), ROUNDED)
    assert judged.passed, judged.detail
    assert judged.figures["noise"] < 0.1


def test_biases_of_mlx(tmp_path: Path) -> None:
    """Integers of 2 to 8 bits are kept, also in products of several widths."""
    how: Any = {"formats": ("int8", "int4"), "rounds_to": "int8", "pipeline": CPU, "drafts": False}
    model, widths = opened(WRITTEN / "mlx_deepseek", **how), set[int]()
    for format, held, wanted in held_products(model, tmp_path):
        assert format.offsets == "minima"
        assert torch.equal(held, wanted)
        widths.add(format.bits)
    assert model.checkpoint.losses.keys() == {"model.embed_tokens.weight"}
    assert widths == {4, 8}


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.full) for n in ("awq", "gptq")), "many"]
)
def test_an_engine(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """It says what the dequantised model says when its products' inputs are rounded to int8."""
    request = build_request(folders[name], (1,), max_seq_len=64, out=tmp_path / "e")
    (built,) = build(request)
    assert (built.manifest.build.weights, built.manifest.build.exact) == ("int4", True)
    check_rounded(plain_with_rounding(folders[name]), PROMPTS, played(built.folder, PROMPTS))
