"""The models that recipes name: their configurations' numbers, and sizes against the arithmetic.

No published checkpoint is read here. What is said of them comes from their model cards and
configurations; parameters are counted by formulas that are written out here, and know nothing of a
weight table.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.checkpoint.config import DEEPSEEK
from mtpbuild.builder.models import ModelConfig, find_family_of, load_config
from mtpbuild.builder.models.common.rope import compute_inverse_frequencies, softmax_scale
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.builder.models.dense import MimoConfig
from mtpbuild.builder.models.glm4_moe import Glm4MoeConfig
from mtpbuild.builder.plan.recipe import Recipe, find_recipe, load_recipes
from mtpbuild.builder.plan.weight_classes import (
    COPIES,
    MAIN,
    MODULES,
    CheckpointPortion,
    WeightClass,
    count_classes,
    find_layout,
    sum_portions,
)
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.runtime.ranks import ALONE

TOOL = Path(__file__).parents[2] / "tools" / "sparse_checkpoint.py"


@dataclass(frozen=True)
class Said:
    """What is published of a model: parameters in billions, shape of its caches.

    active: of the trunk, with embedding and head.
    """

    trunk: float
    active: float
    module: float
    copies: float
    family: str
    layers: int
    dense: int  # layers, the first ones
    width: int  # of a cache row


MODELS = {
    "gigachat3-10b-a1.8b-bf16": Said(10.673, 1.825, 0.4132, 0, "DeepseekV3ForCausalLM", 26, 1, 576),
    "gigachat3-10b-a1.8b": Said(10.673, 1.825, 0.4132, 0, "DeepseekV3ForCausalLM", 26, 1, 576),
    "moonlight-16b-a3b-instruct": Said(15.960, 2.915, 0, 0, "DeepseekV3ForCausalLM", 27, 1, 576),
    "kimi-k2-instruct": Said(1026.4, 32.86, 0, 0, "DeepseekV3ForCausalLM", 61, 1, 576),
    "glm-4.7-flash": Said(29.943, 3.897, 0.6437, 0.634, "Glm4MoeLiteForCausalLM", 47, 1, 576),
    "glm-4.5-air": Said(106.85, 13.42, 2.375, 1.242, "Glm4MoeForCausalLM", 46, 1, 2048),
    "glm-4.5": Said(352.80, 33.63, 3.988, 1.552, "Glm4MoeForCausalLM", 92, 3, 2048),
    "glm-4.6": Said(352.80, 33.63, 3.988, 0, "Glm4MoeForCausalLM", 92, 3, 2048),
    "glm-4.7": Said(352.80, 33.63, 3.988, 1.552, "Glm4MoeForCausalLM", 92, 3, 2048),
    "mimo-7b-rl": Said(7.623, 7.623, 0.2108, 0, "MiMoForCausalLM", 36, 36, 2048),
    "deepseek-v3.2": Said(671.88, 38.40, 11.624, 1.853, "DeepseekV32ForCausalLM", 61, 3, 704),
    "glm-5": Said(743.91, 41.785, 9.953, 0, "GlmMoeDsaForCausalLM", 78, 3, 704),
    "glm-5.1": Said(743.91, 41.785, 9.953, 0, "GlmMoeDsaForCausalLM", 78, 3, 704),
}


LATER = ("glm-4.7", "glm-5.1")  # of the shape of the model before


def recipe_of(name: str) -> Recipe:
    recipe = find_recipe(name)
    assert recipe is not None
    return recipe


def raw_config(name: str) -> dict[str, Any]:
    folder = recipe_of(name).config_folder
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def is_moe(c: dict[str, Any]) -> bool:
    return "n_routed_experts" in c


def load_config_of(name: str) -> ModelConfig:
    return load_config(recipe_of(name).config_folder)


def attention(c: dict[str, Any]) -> int:
    """Return parameters of one layer's attention, with its norms and biases."""
    E, H = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" in c:
        r, n, R, v = (
            c[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        low = c["q_lora_rank"]
        queries = E * H * (n + R) if low is None else E * low + low + low * H * (n + R)
        own = queries + E * (r + R) + r + r * H * (n + v) + H * v * E
        heads, size = c.get("index_n_heads", 0), c.get("index_head_dim", 0)
        return own + (low or 0) * heads * size + E * size + 2 * size + E * heads
    D = c["head_dim"]
    columns = (H + 2 * c["num_key_value_heads"]) * D
    norms = 2 * D if c.get("use_qk_norm") else 0
    return E * columns + (columns if c["attention_bias"] else 0) + norms + H * D * E


def feed_forward(c: dict[str, Any], sparse: bool) -> int:
    E = c["hidden_size"]
    if not sparse:
        return 3 * E * c["intermediate_size"]
    routed, expert = c["n_routed_experts"], 3 * E * c["moe_intermediate_size"]
    return routed * (expert + E + 1) + c["n_shared_experts"] * expert


def counted(c: dict[str, Any]) -> dict[str, int]:
    """Parameters of main model and MTP layers; copies of embedding and head, if there are any."""
    E, ends, layers = c["hidden_size"], 2 * c["vocab_size"] * c["hidden_size"], []
    for i in range(c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
        sparse = is_moe(c) and i >= c["first_k_dense_replace"]
        layers.append(attention(c) + feed_forward(c, sparse) + 2 * E)
    trunk, modules = layers[: c["num_hidden_layers"]], layers[c["num_hidden_layers"] :]
    return {
        MAIN: ends + sum(trunk) + E,
        MODULES: sum(modules) + len(modules) * (3 * E + 2 * E * E),
        COPIES: len(modules) * ends,
    }


def test_all_models_are_here() -> None:
    named = {recipe.name for recipe in load_recipes() if recipe.repository is not None}
    # `test_qwen_models.py` and `test_gemma4.py` have theirs; the arithmetic here gives each layer
    # an indexer.
    others = ("deepseek-", "qwen3", "glm-5.2", "gemma-4", "smollm2")
    assert {name for name in named if not name.startswith(others) or name in MODELS} == {*MODELS}


@cache
def classes(name: str) -> list[WeightClass]:
    return count_classes(find_layout(name, None), ALONE)


def portions(name: str) -> dict[str, CheckpointPortion]:
    return sum_portions(find_layout(name, None), classes(name))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if n in LATER else []) for n in MODELS]
)
def test_parameters(name: str) -> None:
    """They are the arithmetic's exactly, and the published ones to their last digit."""
    output, found = MODELS[name], {part: p.parameters for part, p in portions(name).items()}
    wanted = counted(raw_config(name)) | ({} if output.copies else {COPIES: 0})
    assert found == wanted
    published = {MAIN: output.trunk, MODULES: output.module, COPIES: output.copies}
    assert {p: n / 1e9 for p, n in found.items()} == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_active_parameters(name: str) -> None:
    """All but those of the experts that a token does not choose."""
    c, output = raw_config(name), MODELS[name]
    experts = c.get("n_routed_experts", 0) - c.get("num_experts_per_tok", 0)
    idle = 3 * c["hidden_size"] * c.get("moe_intermediate_size", 0) * experts
    active = counted(c)[MAIN] - (output.layers - output.dense) * idle
    assert active / 1e9 == pytest.approx(output.active, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_downloads(name: str) -> None:
    found = sum(portion.bytes for portion in portions(name).values())
    assert recipe_of(name).download == round(found / 1e9)


@pytest.mark.parametrize("name", [name for name in MODELS if recipe_of(name).layout == "bf16"])
def test_bytes_in_bf16(name: str) -> None:
    """Two for each parameter, but four where a router's biases are."""
    c, found = raw_config(name), portions(name).values()
    layers = c["num_hidden_layers"] + c["num_nextn_predict_layers"] - MODELS[name].dense
    biases = layers * c.get("n_routed_experts", 0)
    parameters = sum(portion.parameters for portion in found)
    assert sum(portion.bytes for portion in found) == 2 * parameters + 2 * biases


def test_gigachat_is_its_makers_gguf_to_the_byte() -> None:
    """21,350,179,072 bytes of tensors: vectors and routers in fp32, the rest in bf16."""
    c = raw_config("gigachat3-10b-a1.8b-bf16")
    E, layers, sparse = c["hidden_size"], c["num_hidden_layers"], c["num_hidden_layers"] - 1
    wide = layers * (2 * E + c["kv_lora_rank"]) + E + sparse * c["n_routed_experts"] * (E + 1)
    assert 2 * counted(c)[MAIN] + 2 * wide == 21_350_179_072


def test_kimi_in_fp8() -> None:
    """One byte for each value of a product, and a number in fp32 for each block of 128 x 128."""
    experts = next(one for one in classes("kimi-k2-instruct") if one.name == "experts")
    assert experts.parameters == 60 * 384 * 3 * 7168 * 2048
    assert experts.bytes == experts.parameters + experts.parameters // 128**2 * 4


@pytest.mark.parametrize("name", MODELS)
def test_shapes(name: str) -> None:
    config, output = load_config_of(name), MODELS[name]
    family, modules = find_family_of(config), config.num_nextn_predict_layers
    assert family.name == output.family
    assert (config.num_hidden_layers, modules) == (output.layers, int(output.module > 0))
    assert family.cache_widths(config, ALONE) == [output.width] * (output.layers + modules)
    experts = getattr(config, "moe_layers", (False,) * (output.layers + modules))
    sparse = (True,) * (output.layers - output.dense + modules) if is_moe(raw_config(name)) else ()
    assert experts[: output.dense] == (False,) * output.dense
    assert experts[output.dense :] == (sparse or (False,) * modules)
    assert config.mtp == DEEPSEEK or isinstance(config, MimoConfig)


# Computed from the published configurations by YaRN's formulas.
YARN = {
    "gigachat3-10b-a1.8b-bf16": {8: 0.0562341, 9: 0.0357302, 16: 8.98374e-4}
    | {19: 1.67907e-5, 31: 2.23908e-7},
    "kimi-k2-instruct": {19: 1.62176e-3, 20: 3.61405e-5},
}


@pytest.mark.parametrize("name", YARN)
def test_yarn(name: str) -> None:
    config = load_config_of(name)
    assert isinstance(config, DeepseekV3Config)
    frequencies = compute_inverse_frequencies(config.rope, config.qk_rope_head_dim)
    for i, value in YARN[name].items():
        assert frequencies[i].item() == pytest.approx(value, rel=5e-6), i


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("gigachat3-10b-a1.8b-bf16", 0.1446796),
        ("kimi-k2-instruct", 0.1308608),
        ("moonlight-16b-a3b-instruct", 192**-0.5),
        ("glm-4.7-flash", 0.0625),
    ],
)
def test_softmax_scale_of_latent_attention(name: str, scale: float) -> None:
    config = load_config_of(name)
    assert isinstance(config, DeepseekV3Config)
    assert softmax_scale(config.rope, config.qk_head_dim) == pytest.approx(scale, rel=5e-7)
    assert config.rope_interleave
    assert config.latent_norm_eps == 1e-6


def test_kimi_with_the_longer_context() -> None:
    config = load_config_of("kimi-k2-instruct")
    assert softmax_scale(replace(config.rope, factor=64.0), 192) == pytest.approx(0.1446796)


@pytest.mark.parametrize("name", ["glm-4.5-air", "glm-4.5", "glm-4.6", "glm-4.7", "mimo-7b-rl"])
def test_grouped_attention(name: str) -> None:
    config = load_config_of(name)
    assert isinstance(config, Glm4MoeConfig | MimoConfig)
    assert softmax_scale(config.rope, config.head_dim) == pytest.approx(128**-0.5)
    assert config.rotary_dim == (128 if name == "mimo-7b-rl" else 64)
    assert config.attention_bias
    assert config.use_qk_norm == (name in ("glm-4.5", "glm-4.6", "glm-4.7"))


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        pytest.param("glm-4.7-flash", 9703, marks=pytest.mark.full),
        ("gigachat3-10b-a1.8b-bf16", 5113 + 208),
    ],
)
def test_a_checkpoint_of_holes(name: str, tensors: int, tmp_path: Path) -> None:
    """The headers are the published checkpoint's: as many tensors, copies in the MTP layer too."""
    out = tmp_path / "sparse"
    command = [sys.executable, str(TOOL), name, "--out", str(out)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wanted = counted(raw_config(name)) | ({} if MODELS[name].copies else {COPIES: 0})
    numbers = dict(re.findall(r"^(.+): ([\d,]+) parameters, ", told, re.M))
    assert {part: int(n.replace(",", "")) for part, n in numbers.items()} == wanted
    opened = open_checkpoint(out)
    config = load_config_of(name)
    opened.check(config)
    assert len(opened.tensors) == tensors
    same = find_family_of(config).duplicates(config)
    assert len(same.keys() & opened.tensors.keys()) == (2 if MODELS[name].copies else 0)
