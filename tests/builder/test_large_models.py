"""Large models on a CPU: heads in int8, and a refusal of what onnxruntime would pack too often."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from mtpbuild.builder.build import build
from mtpbuild.builder.dry_run import dry_run
from mtpbuild.builder.forecast.cpu import forecast_cpu
from mtpbuild.builder.forecast.forecast import ForecastRequest
from mtpbuild.builder.prepare import prepare
from mtpbuild.builder.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.targets.onnxruntime import refuse_copies
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime import Engine, SamplingParams, cpu_library
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest
from mtpbuild.runtime.cpu_library import find_library
from mtpbuild.runtime.errors import UsageError
from tests.support.checkpoints import QUANTIZABLE, make_predictable, save_checkpoint
from tests.support.invoke import invoke

needs_library = pytest.mark.skipif(
    find_library() is None, reason="there was no C++ compiler to build it"
)
HEADS = 32
SHAPE = QUANTIZABLE | {  # all outputs are whole panels
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 512,  # so many elements that heads are worth an operator each
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}
MANY = SHAPE | {"n_routed_experts": 24, "num_experts_per_tok": 3, "first_k_dense_replace": 0}
PRODUCTS = {"MatMul", "MatMulNBits", "QMoE", "Gemm"}  # whose weights onnxruntime packs


@pytest.fixture(scope="module", params=[SHAPE, MANY], ids=["few", "many"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("large") / "model"
    return save_checkpoint(place, make_predictable(**request.param), **request.param)


def asked(
    folder: Path, out: Path, weights: str | None = "int4", kernels: str = "own"
) -> BuildRequest:
    scheme, options = build_scheme(weights), {"kernels": kernels}
    return BuildRequest(
        str(folder), nextn=(1,), max_seq_len=64, out=out, scheme=scheme, options=options
    )


def graphs(engine: Path) -> Iterator[onnx.GraphProto]:
    for name in read_manifest(engine).programs:
        yield onnx.load(engine / f"{name}.onnx", load_external_data=False).graph


def packed_bytes(engine: Path) -> int:
    """Count the bytes of the weights file that onnxruntime's products read, each once."""
    found = dict[int, int]()
    for graph in graphs(engine):
        places = {}
        for tensor in graph.initializer:
            entries = {entry.key: int(entry.value) for entry in tensor.external_data[1:]}
            if "offset" in entries:
                places[tensor.name] = entries["offset"], entries["length"]
        casts = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Cast"}
        for node in graph.node:
            if node.op_type in PRODUCTS:
                read = (casts.get(name, name) for name in node.input)
                found |= dict(places[name] for name in read if name in places)
    return sum(found.values())


@needs_library
def test_wide_heads(folder: Path, tmp_path: Path) -> None:
    """`kv_b_proj` is int8 beside integer products, in one operator; a forecast knows it."""
    (own,) = build(asked(folder, tmp_path / "own"))
    (stock,) = build(asked(folder, tmp_path / "stock", kernels="stock"))
    for graph in graphs(own.folder):
        names = {i.name for i in graph.initializer}
        for weight in ("w_uk", "w_uv"):
            found = [n for n in names if f"layers.0.self_attn.{weight}." in n and "values" in n]
            assert len(found) == 1
    for engine in (own, stock):
        assert engine.manifest.build.block_size == 32
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, 7).tolist() for _ in range(20)]
    params, texts = SamplingParams(max_tokens=1, ignore_eos=True), []
    for engine in (own, stock):
        with Engine.load(engine.folder, threads=1) as loaded:
            texts.append([result.token_ids for result in loaded.generate(prompts, params)])
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 18  # of a random model's tokens
    forecast = forecast_cpu(ForecastRequest(str(folder), (1,)))
    sizes = {engine.weights: engine.bytes for engine in forecast.engines}
    (foreseen,) = dry_run(asked(folder, tmp_path / "dry"), Stages()).engines
    assert sizes["int4"] == foreseen.weights
    assert own.manifest.files[WEIGHTS].size - foreseen.weights < 1 << 16  # its header


@pytest.mark.parametrize(
    ("weights", "kernels"),
    [
        ("int4", "stock"),
        (None, "stock"),
        *(pytest.param(w, "own", marks=needs_library) for w in (None, "int4")),
    ],
)
def test_what_onnxruntime_packs(
    weights: str | None, kernels: str, folder: Path, tmp_path: Path
) -> None:
    """The bytes that are counted before a build are those that its products read."""
    request = asked(folder, tmp_path / "e", weights, kernels)
    counted = prepare(request).open_model(device="meta").stock_bytes
    (built,) = build(request)
    assert counted == packed_bytes(built.folder)
    assert (counted == 0) == (kernels == "own")


@pytest.mark.parametrize(
    ("weights", "kernels", "library", "says"),
    [
        pytest.param("int4", "stock", True, "none: leave out --kernels stock", marks=needs_library),
        pytest.param(None, "stock", True, "none: leave out --kernels stock", marks=needs_library),
        ("int4", "auto", False, "none: install g++, then install mtpbuild again with pip"),
        (None, "auto", False, "none: install g++, then install mtpbuild again with pip"),
    ],
)
def test_a_model_that_is_too_large(
    weights: str | None,
    kernels: str,
    library: bool,
    says: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not library:
        monkeypatch.setattr(cpu_library, "FILE", "nothing.so")
    job = prepare(asked(folder, tmp_path / "e", weights, kernels))
    model, (plan,) = job.open_model(device="meta"), job.plans.values()
    refuse_copies(model, plan, 3 * model.stock_bytes)
    with pytest.raises(UsageError) as refused:
        refuse_copies(model, plan, 3 * model.stock_bytes - 1)
    assert str(refused.value).endswith(says)
    assert "for each of 3 programs" in str(refused.value)


def test_a_build_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this machine's memory, before anything is written."""
    sizes = {"SC_PHYS_PAGES": 300, "SC_PAGE_SIZE": 4096}
    ask = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: sizes.get(name) or ask(name))
    flags = ("--model", folder, "--nextn", "1", "--kernels", "stock", "--out", tmp_path / "e")
    for more in ((), ("--dry-run",)):
        code, out, err = invoke("build", *flags, *more)
        assert (code, out) == (2, "")
        assert "this machine's memory is 0.0 GB" in err
        assert err.count("error: ") == 1
    assert not any(tmp_path.iterdir())
