"""int8 and int4 weights that stay as they are: in the model, in the weights file, in an engine."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpbuild.builder.compiler.notes import list_notes
from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.formats.integers import INT4, INT8
from mtpbuild.builder.models.common.blocks import (
    EmbeddingBlocks,
    PackedBlocks,
    PackedExperts,
)
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.builder.program.opened_model import OpenedModel
from mtpbuild.builder.targets.onnxruntime.pipeline import CPU
from mtpbuild.builder.weights.scheme import SCHEMES, Scheme, make_scheme
from mtpbuild.lab.measure.checks import ROUNDED
from mtpbuild.lab.verify.plain import judge_texts, load_plain
from mtpbuild.runtime import Engine
from mtpbuild.runtime.contract.manifest import MANIFEST, WEIGHTS, read_manifest
from mtpbuild.runtime.contract.state import name_layer_rows
from mtpbuild.runtime.errors import EngineError
from tests.support.checkpoints import QUANTIZABLE, load_config, make_predictable, save_checkpoint
from tests.support.numbers import check_rounded, plain_with_rounding, played
from tests.support.opened import load_model, opened
from tests.support.requests import build, quantize

BOTH = ("int8", "int4")
MANY = QUANTIZABLE | {"n_routed_experts": 24, "num_experts_per_tok": 3}  # chosen ones are gathered
PROMPTS = [[5, 17, 3], [40, 2], [9, 9, 33, 21, 60]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("plain") / "model"
    return save_checkpoint(folder, make_predictable(**QUANTIZABLE), **QUANTIZABLE)


@pytest.fixture(scope="module")
def folders(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the same model in int8, int4, with modules in int4 alone; one with many experts.

    ends, tied: embedding and head are in int8 too, in one they are the same tensor. mixed: one of
    the experts' products is in int8, the other in int4.
    """
    place = tmp_path_factory.mktemp("integers")
    many = save_checkpoint(place / "many-plain", make_predictable(**MANY), **MANY)
    shape = QUANTIZABLE | {"tie_word_embeddings": True}
    tied = save_checkpoint(place / "tied-plain", make_predictable(**shape), **shape)
    halves = Scheme("int4", "int4", ("*.kv_b_proj", "*.mlp.experts.*.down_proj"))
    schemes = {
        "int8": (plain, SCHEMES["int8"]),
        "int4": (plain, SCHEMES["int4"]),
        "ends": (plain, make_scheme("int4", None, None, head="int8")),
        "tied": (tied, make_scheme("int8", None, None, head="int8")),
        "mtp": (plain, Scheme(None, "int4")),
        "many": (many, SCHEMES["int4"]),
        "many-int8": (many, SCHEMES["int8"]),
        "halves": (many, halves),
    }
    for name, (source, scheme) in schemes.items():
        quantize(QuantizeRequest(str(source), scheme, place / name))
    downs = [place / name / "model.safetensors" for name in ("many-int8", "many")]
    shutil.copytree(place / "many", place / "mixed")
    eights, fours = map(load_file, downs)
    mixed = fours | {n: w for n, w in eights.items() if ".mlp.experts." in n and "down_proj" in n}
    save_file(mixed, place / "mixed" / "model.safetensors")
    return {name: place / name for name in (*schemes, "mixed")}


def source(folder: Path, formats: tuple[str, ...]) -> OpenedModel:
    return opened(folder, formats=formats, pipeline=CPU)


@pytest.mark.parametrize("name", [*BOTH, "ends", "tied", "many", "many-int8", "mixed"])
def test_products_in_blocks(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Joined, permuted, split in blocks and packed, the weights are the dequantised model's."""
    kept = source(folders[name], BOTH)
    EngineWeights(kept).write(tmp_path, siblings=tmp_path / "none")
    stored = load_file(tmp_path / WEIGHTS)
    kept.model.load_state_dict(stored, assign=True)
    whole = load_model(folders[name], kept.config)
    kinds = (PackedBlocks, PackedExperts, EmbeddingBlocks)
    values = {n: m for n, m in kept.model.named_modules() if isinstance(m, kinds)}
    floats = {name for name, each in values.items() if each.values.dtype == torch.float32}
    assert floats == {w.name for w in kept.table if w.packed} - kept.table.formats.keys()
    values = {name: each for name, each in values.items() if name not in floats}
    assert set(values) == set(kept.table.formats)
    # Per layer: from the input, q_b, o, gate and up, down; of shared experts too; both ends.
    both = {"ends": 2, "tied": 1}  # of a tied one the head's weight is the embedding, too
    more = 2 * 2 if name.startswith(("many", "mixed")) else both.get(name, 0)
    assert len(values) == 3 * 5 + more
    for blocks in values.values():
        assert blocks.values.dtype == torch.uint8
    width = load_config(folders[name]).cache_dim
    caches = {name_layer_rows(i): torch.zeros(1, 1, 9, width) for i in range(2)}
    tokens, start = torch.tensor([[5, 17, 3, 60]]), torch.zeros(1, dtype=torch.int64)
    logits = []
    for model in (kept.model.eval(), whole):
        hidden, _ = model(tokens, caches, model.rope(start, 4))
        logits.append(model.logits(hidden))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_what_stays(
    folders: dict[str, Path], plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only formats that the target runs, and only products that are in one of them as a whole."""
    assert source(plain, BOTH).weights_type == "float32"
    latents = {f"{at}.self_attn.qkv_a_proj" for at in ("layers.0", "layers.1", "mtp.0")}
    assert source(folders["int4"], ("int8",)).table.formats.keys() == latents
    assert source(folders["int4"], ("int4",)).table.formats.keys().isdisjoint(latents)
    kept = source(folders["int4"], BOTH)
    assert kept.weights_type == "int4"
    formats = {name: each.name for name, each in kept.table.formats.items()}
    assert {name for name in formats if formats[name] == "int8"} == latents
    assert "layers.0.self_attn.w_uk" not in kept.table.formats
    assert "layers.1.mlp.experts.down_proj" in kept.table.formats
    assert source(folders["int8"], BOTH).weights_type == "int8"
    experts = [f"layers.1.mlp.{leaf}" for leaf in ("gate_up_proj", "down_proj")]
    assert set(experts) <= set(source(folders["many"], BOTH).table.formats)
    assert not set(experts) & set(source(folders["halves"], BOTH).table.formats), "both or none"
    modules = source(folders["mtp"], BOTH)
    assert all(name.startswith("mtp.0.") for name in modules.table.formats)
    whole = source(folders["int4"], ())
    counts = {each.table.parameters for each in (whole, kept, source(plain, ()))}
    assert len(counts) == 1
    assert [*list_notes(kept)] == []
    count = 3 * 2 + 3 + 2 * 9 * 3  # q_b and o of attentions, a dense MLP, experts
    output = f"quantised weights ({count} in int4, {3 * 2} in int8) are dequantised"
    assert output in "".join(list_notes(whole))


@pytest.mark.parametrize("fills", [True, False])
def test_queries_in_int4_beside_latents_in_int8(fills: bool, tmp_path: Path) -> None:
    """One product holds both as they are; rows of int4 that fill no panels become int8, exactly."""
    shape = QUANTIZABLE | {"q_lora_rank": None}
    if fills:
        shape |= {"qk_nope_head_dim": 28}
    plain = save_checkpoint(tmp_path / "plain", make_predictable(**shape), **shape)
    quantize(QuantizeRequest(str(plain), SCHEMES["int4"], tmp_path / "int4"))
    kept = source(tmp_path / "int4", BOTH)
    (tmp_path / "e").mkdir()
    EngineWeights(kept).write(tmp_path / "e", siblings=None)
    kept.model.load_state_dict(load_file(tmp_path / "e" / WEIGHTS), assign=True)
    name = "layers.0.self_attn.qkv_a_proj"
    module, whole = kept.model.get_submodule(name), load_model(tmp_path / "int4", kept.config)
    wanted = whole.get_parameter(name)
    assert isinstance(module, PackedBlocks)
    assert module.scales is not None
    assert torch.equal(torch.eye(len(wanted)) @ module, wanted)
    held, at = kept.table.stored_formats, "model.layers.0.self_attn"
    assert held[f"{at}.q_proj.weight"] is (INT4 if fills else INT8)
    assert held[f"{at}.kv_a_proj_with_mqa.weight"] is INT8


@pytest.mark.full
@pytest.mark.parametrize("name", ["int4", "many", "mixed"])
def test_an_engine(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """It says what the dequantised model says when its products' inputs are rounded to int8."""
    request = BuildRequest(str(folders[name]), nextn=(1,), max_seq_len=64, out=tmp_path / "e")
    (built,) = build(request)
    manifest = read_manifest(tmp_path / "e")
    assert manifest.build.weights == "int4"
    assert manifest.files[WEIGHTS].size < 0.35 * 4 * built.manifest.model.parameters
    output = played(tmp_path / "e", PROMPTS)
    check_rounded(plain_with_rounding(folders[name]), PROMPTS, output)
    # Random weights magnify what rounding changes; trained ones stay within ROUNDED.
    assert not judge_texts(load_plain(folders[name]), PROMPTS, output, ROUNDED).passed


@pytest.mark.full
def test_a_portable_engine(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is dequantised, which a line says. One with integers, as once, is refused."""
    request = BuildRequest(str(folders["many"]), (1,), max_seq_len=64, out=tmp_path / "e")
    (built,) = build(replace(request, options={"portable": True}))
    assert (built.manifest.build.cpu_layout, built.manifest.build.weights) == (None, "float32")
    assert "in int8) are dequantised: the engine holds them in float32" in caplog.text
    check_rounded(load_plain(folders["many"]), PROMPTS, played(built.folder, PROMPTS, 20))
    older = built.manifest.build.model_copy(update={"weights": "int4", "block_size": 32})
    manifest = built.manifest.model_copy(update={"build": older})
    (built.folder / MANIFEST).write_text(manifest.to_json())
    with pytest.raises(EngineError, match=r"its int4 products are by operators .* build it again$"):
        Engine.load(built.folder)


@pytest.mark.parametrize(
    ("name", "nextn"),
    [
        ("tied-plain", 0),
        pytest.param("tied-plain", 1, marks=pytest.mark.full),
        pytest.param("tied", 1, marks=pytest.mark.full),
    ],
)
def test_a_tied_engine_has_one_tensor(
    name: str, nextn: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    """It says what an engine of the same weights in two tensors says, to the bit."""
    tied = folders["tied"].with_name(name)
    two = shutil.copytree(tied, tmp_path / "two")
    config = json.loads((two / "config.json").read_text())
    (two / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(two / "model.safetensors")
    parts = {n: w for n, w in weights.items() if n.startswith("model.embed_tokens")}
    heads = {n.replace("model.embed_tokens", "lm_head"): w.clone() for n, w in parts.items()}
    save_file(weights | heads, two / "model.safetensors")
    texts, sizes = [], []
    for folder in (tied, two):
        out = tmp_path / f"{folder.name}-engine"
        build(BuildRequest(str(folder), (nextn,), out=out))
        output = [(text.token_ids, text.logprobs) for text in played(out, PROMPTS)]
        texts.append(output)
        sizes.append((out / WEIGHTS).stat().st_size)
    assert texts[0] == texts[1]
    assert sizes[1] - sizes[0] > 0.9 * sum(w.nbytes for w in parts.values())
