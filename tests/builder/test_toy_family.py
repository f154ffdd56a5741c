"""A family that is no kin of DeepSeek-V3: registered, built, and equal to its own oracle."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mtpbuild.builder.models import find_family, find_family_of, load_config, register
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.builder.plan.plan import DrafterName
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.programs import load_programs
from tests.reference.recompute import greedy
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import EngineBuilder
from tests.support.forced import check_programs
from tests.support.inductor_engines import compiled_soon
from tests.support.toy_family import CONFIG, TOY, PlainToy, make_toy

CHUNK = 4
DRAFTERS: dict[int, DrafterName | None] = {0: None, 1: "mtp-vanilla", 2: "mtp-eagle"}


@pytest.fixture(scope="module")
def toy() -> PlainToy:
    torch.set_num_threads(1)
    register(TOY)
    return make_toy()


@pytest.fixture(scope="module")
def folder(toy: PlainToy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("toys") / "toy", CONFIG, toy)


@pytest.mark.full
@pytest.mark.parametrize("nextn", [1, 0, 2])
def test_onnxruntime(nextn: int, toy: PlainToy, folder: Path, build_engine: EngineBuilder) -> None:
    check_engine(build_engine(folder, nextn, prefill_chunk=CHUNK), toy, nextn)


@pytest.mark.full
@pytest.mark.xdist_group("inductor")
def test_inductor(toy: PlainToy, folder: Path, build_engine: EngineBuilder) -> None:
    with compiled_soon():
        engine = build_engine(folder, 2, target="inductor", prefill_chunk=CHUNK)
    check_engine(engine, toy, 2)


def check_engine(engine: Path, toy: PlainToy, nextn: int) -> None:
    """Every step's tokens and drafts are the reference's; natural drafts are often accepted."""
    manifest = read_manifest(engine)
    assert manifest.model.architecture == "ToyForCausalLM"
    assert manifest.build.drafter == DRAFTERS[nextn]
    caches = {s.name: s.shape for s in manifest.state if s.role == "rows"}
    width = 2 * CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    assert {shape[3] for shape in caches.values()} == {width}
    assert set(caches) == {"kv.0"} | ({"mtp_kv.0"} if nextn else set())

    programs = load_programs(engine, manifest, threads=1)
    check_programs(programs, toy, nextn, DRAFTERS[nextn], CHUNK)
    rng = np.random.default_rng(nextn)

    prompts = [rng.integers(0, CONFIG["vocab_size"], n).tolist() for n in (2, 9, 30)]
    with Engine.load(engine, threads=1) as loaded:
        results = loaded.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == greedy(toy, prompt, 60)
        if nextn:
            assert (result.metrics.speculative_decoding.mean_acceptance_length or 0) > 1.2


def test_attention_matters(toy: PlainToy) -> None:
    """The same last token behind other ones is followed by other text."""
    texts = {tuple(greedy(toy, [first, 7, 5], 12)) for first in range(8)}
    assert len(texts) > 4


def test_the_registry(folder: Path) -> None:
    assert find_family(CONFIG) is TOY
    assert find_family_of(load_config(folder)) is TOY
    assert not issubclass(TOY.config, DeepseekV3Config)
    known = (
        "DeepseekV3ForCausalLM (deepseek_v3), "
        "Glm4MoeLiteForCausalLM (glm4_moe_lite), "
        "DeepseekV32ForCausalLM (deepseek_v32), "
        "GlmMoeDsaForCausalLM (glm_moe_dsa), "
        "DeepseekV4ForCausalLM (deepseek_v4), "
        "Glm4MoeForCausalLM (glm4_moe), "
    )
    output = re.escape(f"Other; supported: {known}") + r".*ToyForCausalLM \(toy\)"
    with pytest.raises(CheckpointError, match=output):
        find_family({"architectures": ["Other"]})


def test_its_plain_model(toy: PlainToy, folder: Path) -> None:
    """`mtpbuild verify` judges by the family's own reference."""
    loaded = load_plain(folder)
    assert isinstance(loaded, PlainToy)
    assert greedy(loaded, [3, 1, 4], 8) == greedy(toy, [3, 1, 4], 8)
