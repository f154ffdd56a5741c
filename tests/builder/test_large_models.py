"""Large models on a CPU: their per-head products are in int8."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.forecast.cpu import forecast_cpu
from mtpbuild.builder.forecast.forecast import ForecastRequest
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest
from tests.support.checkpoints import QUANTIZABLE, make_predictable, save_checkpoint

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


@pytest.fixture(scope="module", params=[SHAPE, MANY], ids=["few", "many"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("large") / "model"
    return save_checkpoint(place, make_predictable(**request.param), **request.param)


def asked(folder: Path, out: Path, weights: str | None) -> BuildRequest:
    scheme = build_scheme(weights)
    return BuildRequest(str(folder), nextn=(1,), max_seq_len=64, out=out, scheme=scheme)


def graphs(engine: Path) -> Iterator[onnx.GraphProto]:
    for name in read_manifest(engine).programs:
        yield onnx.load(engine / f"{name}.onnx", load_external_data=False).graph


def test_wide_heads(folder: Path, tmp_path: Path) -> None:
    """`kv_b_proj` is int8 beside integer products, in one operator; a forecast knows it."""
    own, eight, plain = (
        build(asked(folder, tmp_path / str(weights), weights))[0]
        for weights in ("int4", "int8", None)
    )
    for graph in graphs(own.folder):
        names = {i.name for i in graph.initializer}
        for weight in ("w_uk", "w_uv"):
            found = [n for n in names if f"layers.0.self_attn.{weight}." in n and "values" in n]
            assert len(found) == 1
    for engine in (own, eight):
        assert engine.manifest.build.block_size == 32
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, 7).tolist() for _ in range(20)]
    params, texts = SamplingParams(max_tokens=1, ignore_eos=True), []
    for engine in (eight, plain):
        with Engine.load(engine.folder, threads=1) as loaded:
            texts.append([result.token_ids for result in loaded.generate(prompts, params)])
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 14  # of a random model's tokens
    forecast = forecast_cpu(ForecastRequest(str(folder), (1,)))
    sizes = {engine.weights: engine.bytes for engine in forecast.engines}
    (foreseen,) = dry_run(asked(folder, tmp_path / "dry", "int4"), Stages()).engines
    assert sizes["int4"] == foreseen.weights
    assert own.manifest.files[WEIGHTS].size - foreseen.weights < 1 << 16  # its header
