"""DeepSeek-V4's recipes: their sizes against arithmetic that is written out here, and their plans.

No published checkpoint is read here: totals are those of the model cards.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from mtpbuild.builder.models import find_family, load_config
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config, DSparkConfig
from mtpbuild.builder.plan.plan import Plan, count_state_bytes, make_state_specs
from mtpbuild.builder.plan.recipe import Recipe, find_recipe
from mtpbuild.builder.plan.weight_classes import (
    MAIN,
    MODULES,
    count_classes,
    count_file_bytes,
    find_formats,
    find_layout,
    sum_portions,
)
from mtpbuild.lab.forecast.cpu import count_cache_bytes, make_engine_model
from mtpbuild.lab.forecast.forecast import ForecastRequest, forecast
from mtpbuild.lab.forecast.machines import UNKNOWN
from mtpbuild.lab.forecast.report import print_forecast
from mtpbuild.lab.forecast.step import CostModel, StepLoad
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import ALONE, Ranks

PUBLISHED = {  # billions of parameters: all, and of a token
    "deepseek-v4-flash": (284, 13),
    "deepseek-v4-flash-preview": (284, 13),
    "deepseek-v4-pro": (1600, 49),
}
FULL = pytest.mark.full


def recipe_of(name: str) -> Recipe:
    recipe = find_recipe(name)
    assert recipe is not None
    return recipe


def config_of(name: str) -> DeepseekV4Config:
    config = load_config(recipe_of(name).config_folder)
    assert isinstance(config, DeepseekV4Config)
    return config


def counted(c: dict[str, Any], experts: int) -> dict[str, int]:
    """Return the parameters of trunk and MTP module with so many experts in a layer."""
    E, H, D, q, N = (
        c[key]
        for key in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "hc_mult")
    )
    index, inner = c["index_n_heads"] * c["index_head_dim"], c["moe_intermediate_size"]
    rank = c["o_groups"] * c["o_lora_rank"]

    def compressor(width: int, ratio: int) -> int:
        wide = (2 if ratio == 4 else 1) * width
        return 2 * E * wide + ratio * wide + width

    def layer(ratio: int, hashed: bool) -> int:
        own = E * q + q + q * H * D + E * D + D + H
        own += H * D // c["o_groups"] * rank + rank * E
        own += compressor(D, ratio) if ratio else 0
        if ratio == 4:
            own += q * index + E * c["index_n_heads"] + compressor(c["index_head_dim"], ratio)
        chosen = c["vocab_size"] * c["num_experts_per_tok"] if hashed else c["n_routed_experts"]
        own += (experts + 1) * 3 * E * inner + c["n_routed_experts"] * E + chosen
        mixers = 2 * (N * (N + 2) * (N * E + 1) + 3)
        return own + mixers + 2 * E

    ends, heads = 2 * c["vocab_size"] * E, N * (N * E + 1) + 1
    ratios = c["compress_ratios"][: c["num_hidden_layers"]]
    trunk = sum(layer(ratio, i < c["num_hash_layers"]) for i, ratio in enumerate(ratios))
    module = layer(0, hashed=False) + 2 * E * E + 3 * E + heads
    trunk += ends + heads + E
    if "dspark_block_size" not in c:
        return {MAIN: trunk, MODULES: module}
    stages = layer(0, hashed=False) * len(c["dspark_target_layer_ids"])
    markov = 2 * c["vocab_size"] * c["dspark_markov_rank"]
    return {MAIN: trunk, MODULES: stages + 3 * E * E + 2 * E + heads + markov}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n.endswith("preview") else [FULL]) for n in PUBLISHED]
)
def test_parameters(name: str) -> None:
    layout, recipe = find_layout(name, None), recipe_of(name)
    c = json.loads((recipe.config_folder / "config.json").read_text())
    found = sum_portions(layout, count_classes(layout, ALONE))
    wanted = counted(c, c["n_routed_experts"])
    assert {part: found[part].parameters for part in wanted} == wanted
    total, active = PUBLISHED[name]
    assert wanted[MAIN] / 1e9 == pytest.approx(total, rel=0.02)
    assert counted(c, c["num_experts_per_tok"])[MAIN] / 1e9 == pytest.approx(active, abs=1.2)
    assert recipe.download == round(sum(portion.bytes for portion in found.values()) / 1e9)


def test_layers() -> None:
    flash, pro = config_of("deepseek-v4-flash"), config_of("deepseek-v4-pro")
    assert (flash.ratios[:4], flash.ratios[-2:]) == ((0, 0, 4, 128), (128, 4))
    assert pro.ratios[:4] == (128, 128, 4, 128)
    assert [sum(c.choosing) for c in (flash, pro)] == [21, 30]
    assert (pro.num_nextn_predict_layers, pro.head) == (1, None)
    assert isinstance(flash.head, DSparkConfig)
    assert (flash.head.stages, flash.head.block_size) == (3, 5)
    assert flash.head.taps == (41, 42, 43)  # layers that read what 40 to 42 return
    assert flash.row_rope.factor == 16
    assert (flash.row_rope.theta, flash.rope.theta, flash.rope.factor) == (160000, 10000, 1)


@FULL
def test_formats_by_the_configuration_alone() -> None:
    """A repository says so before its weights are fetched, and its recipe says the same."""
    name = "deepseek-v4-flash-preview"
    layout, folder = find_layout(name, None), recipe_of(name).config_folder
    config = config_of(name)
    alone = replace(layout, format=find_formats(folder, config))
    formats = [
        {(each.name, each.module): {*each.formats} for each in count_classes(one, ALONE)}
        for one in (layout, alone)
    ]
    assert formats[0] == formats[1]
    assert formats[0]["experts", False] == formats[0]["experts", True] == {"mxfp4"}
    assert formats[0]["shared experts", False] == {"fp8"}
    assert formats[0]["head", False] == {"bf16"}


@FULL
def test_memory_with_dspark() -> None:
    model = make_engine_model(find_layout("deepseek-v4-flash", None), None)
    assert 168e9 < count_file_bytes(model.classes) < 176e9


def test_memory_on_a_cpu() -> None:
    """Experts stay in FP4: the preview has 165 GB at most, with its MTP module."""
    model = make_engine_model(find_layout("deepseek-v4-flash-preview", None), None)
    assert 160e9 < count_file_bytes(model.classes) < 165e9
    experts = sum(each.bytes for each in model.classes if each.name == "experts")
    assert experts == 44 * 256 * 3 * 4096 * 2048 * 17 // 32
    request = ForecastRequest("", (0,), cache_dtype="float32", max_seq_len=65536)
    specs = make_state_specs(Plan(model.config, 0, None, 1, 65536, request.prefill_chunk))
    rows = sum(count_state_bytes(spec) for spec in specs if spec.role in ("rows", "window"))
    assert count_cache_bytes(request, model, 0) == pytest.approx(rows, rel=0.01)


def test_a_steps_cache_bytes() -> None:
    """The window, all rows of 128 tokens, all keys of the indexer, and the chosen rows of 4."""
    model = CostModel(config_of("deepseek-v4-flash-preview"), [], ALONE, UNKNOWN)
    (caches,) = (p for p in model.step(0, StepLoad(1, 65536, "float32")) if p.name == "caches")
    rows = 43 * 128 * 512 + 20 * 512 * 512 + 21 * (16384 * 128 + 512 * 512)
    open_rows = 20 * 128 * 2 * 512 + 21 * 8 * 4 * (512 + 128)
    assert caches.bytes == 4 * (rows + open_rows)


def test_plans_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """None is built there: ranks share the experts, which count as they are stored."""
    request = ForecastRequest("deepseek-v4-flash-preview", (0, 1), gpu="h200", ranks=Ranks(tp=4))
    made = forecast(replace(request, acceptance=(1.0, 1.79), measured={0: 100.0, 1: 160.0}))
    experts = [each for each in made.model.classes if each.name == "experts"]
    assert [4 * each.per_rank for each in experts] == [each.bytes for each in experts]
    assert made.fits
    print_forecast(made)
    told = capsys.readouterr().out
    assert "no engine of this model has several ranks yet" in " ".join(told.split())
    assert "tensorrt" not in told


def test_v4_1_is_refused_by_its_class() -> None:
    raw = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
    with pytest.raises(CheckpointError, match="unsupported architecture DeepseekV41ForCausalLM"):
        find_family(raw)
