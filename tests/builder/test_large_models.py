"""Large models on a CPU: their per-head products are in int8."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.lab.forecast.cpu import forecast_cpu
from mtpbuild.lab.forecast.forecast import ForecastRequest
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest
from tests.reference.recompute import greedy
from tests.support.checkpoints import QUANTIZABLE, make_predictable, save_checkpoint
from tests.support.engines import greedy_ids
from tests.support.requests import build

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


SHAPES = [pytest.param(SHAPE, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("large") / "model"
    return save_checkpoint(place, make_predictable(**request.param), **request.param)


def asked(folder: Path, out: Path, weights: str) -> BuildRequest:
    scheme = build_scheme(weights)
    return BuildRequest(str(folder), nextn=(1,), max_seq_len=64, out=out, scheme=scheme)


def graphs(engine: Path) -> Iterator[onnx.GraphProto]:
    for name in read_manifest(engine).programs:
        yield onnx.load(engine / f"{name}.onnx", load_external_data=False).graph


@pytest.mark.full
def test_large_per_head_products(folder: Path, tmp_path: Path) -> None:
    """`kv_b_proj` is int8 beside integer products, in one operator; a forecast knows it."""
    own, eight = (
        build(asked(folder, tmp_path / weights, weights))[0] for weights in ("int4", "int8")
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
    texts, plain = greedy_ids(eight.folder, prompts, 1), load_plain(folder)
    right = [text == greedy(plain, p, 1) for text, p in zip(texts, prompts, strict=True)]
    assert sum(right) >= 14  # of a random model's tokens
    forecast = forecast_cpu(ForecastRequest(str(folder), (1,)))
    sizes = {engine.weights: engine.bytes for engine in forecast.engines}
    (foreseen,) = dry_run(asked(folder, tmp_path / "dry", "int4"), Stages()).engines
    assert sizes["int4"] == foreseen.weight_file_bytes
    assert own.manifest.files[WEIGHTS].size - foreseen.weight_file_bytes < 1 << 16  # its header
