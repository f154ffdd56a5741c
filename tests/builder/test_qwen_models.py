"""Qwen3.5's recipes: their sizes against arithmetic that is written out here, and published ones.

Published totals count the vision tower and the MTP module; the tower is what they exceed ours by.
"""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.models.qwen3_5.config import Qwen35Config
from mtpbuild.builder.plan.plan import Plan, make_state_specs
from mtpbuild.builder.plan.recipe import find_recipe
from mtpbuild.builder.plan.weight_classes import (
    MAIN,
    MODULES,
    count_classes,
    find_layout,
    sum_portions,
)
from mtpbuild.lab.forecast.machines import UNKNOWN
from mtpbuild.lab.forecast.step import CostModel, StepLoad
from mtpbuild.runtime.ranks import ALONE


@dataclass(frozen=True)
class Said:
    """What model cards say: billions of parameters, with the tower and in a token's way."""

    total: float
    tower: float
    active: float | None = None


MODELS = {
    "qwen3.5-0.8b": Said(0.87, 0.10),
    "qwen3.5-2b": Said(2.27, 0.33),
    "qwen3.5-4b": Said(4.66, 0.33),
    "qwen3.5-9b": Said(9.65, 0.45),
    "qwen3.5-27b": Said(27.78, 0.46),
    "qwen3.5-35b-a3b": Said(35.95, 0.45, 3),
    "qwen3.5-122b-a10b": Said(125.09, 0.45, 10),
    "qwen3.5-397b-a17b": Said(403.4, 0.45, 17),
    "qwen3-next-80b-a3b": Said(81.3, 0, 3),
}


def sizes_of(name: str) -> tuple[dict[str, Any], Qwen35Config]:
    recipe = find_recipe(name)
    assert recipe is not None
    raw = json.loads((recipe.config_folder / "config.json").read_text())
    config = load_config(recipe.config_folder)
    assert isinstance(config, Qwen35Config)
    return raw.get("text_config", raw), config


def counted(c: dict[str, Any]) -> dict[str, int]:
    E, H, G, D = (
        c[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    heads, V = c["linear_num_value_heads"], c["linear_value_head_dim"]
    channels, values = 2 * keys + heads * V, heads * V
    attention = E * (2 * H + 2 * G) * D + 2 * D + H * D * E
    delta = E * (channels + values + 2 * heads) + 4 * channels + 2 * heads + V + values * E
    if experts := c.get("num_experts", 0):
        inner, shared = c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
        second = experts * (3 * E * inner + E) + 3 * E * shared + E
    else:
        second = 3 * E * c["intermediate_size"]
    layers = c["num_hidden_layers"]
    ends = c["vocab_size"] * E * (1 if c["tie_word_embeddings"] else 2)
    firsts = layers // 4 * (attention + 3 * delta)
    return {
        MAIN: ends + firsts + layers * (second + 2 * E) + E,
        MODULES: attention + second + 2 * E + 2 * E * E + 3 * E,
    }


LARGE = ("qwen3.5-122b-a10b", "qwen3.5-397b-a17b")  # the layers of a smaller one


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if n in LARGE else []) for n in MODELS]
)
def test_parameters(name: str) -> None:
    layout, output = find_layout(name, None), MODELS[name]
    wanted = counted(sizes_of(name)[0])
    found = sum_portions(layout, count_classes(layout, ALONE))
    assert {part: found[part].parameters for part in wanted} == wanted
    total = sum(wanted.values()) / 1e9 + output.tower
    assert total == pytest.approx(output.total, rel=6e-3, abs=0.01)
    recipe = find_recipe(name)
    assert recipe is not None
    assert recipe.download == round(sum(portion.bytes for portion in found.values()) / 1e9)


@pytest.mark.parametrize("name", [name for name, output in MODELS.items() if output.active])
def test_active_parameters(name: str) -> None:
    c, output = sizes_of(name)[0], MODELS[name]
    idle = c["num_experts"] - c["num_experts_per_tok"]
    unread = c["num_hidden_layers"] * idle * 3 * c["hidden_size"] * c["moe_intermediate_size"]
    assert output.active is not None
    assert (counted(c)[MAIN] - unread) / 1e9 == pytest.approx(output.active, abs=0.9)


def test_states_of_the_9b() -> None:
    """A quarter of the layers keeps rows; the others keep 50 MB, whatever the context is."""
    config = sizes_of("qwen3.5-9b")[1]
    assert [i for i, delta in enumerate(config.delta_layers) if not delta] == [*range(3, 32, 4)]
    assert config.rotary_dim == 64
    widths = find_family_of(config).cache_widths(config, ALONE)
    assert widths == [0, 0, 0, 2 * 4 * 256] * 8 + [2 * 4 * 256]
    specs = make_state_specs(Plan(config, 3, "mtp-eagle", 2, 4096, 256))
    states = {s.name: s.shape for s in specs if s.role == "recurrent"}
    assert len(states) == 48
    assert states["delta.0"] == (2, 32, 128, 128)
    assert states["conv.30"] == (2, 3, 8192)
    model = CostModel(config, [], ALONE, UNKNOWN)
    assert model.state_bytes == 24 * 4 * (32 * 128 * 128 + 3 * 8192)
    step = model.step(0, StepLoad(2, 100, "float32"))
    parts = {part.name: part.bytes for part in step}
    assert parts["recurrent states"] == 3 * 2 * model.state_bytes
    assert parts["caches"] == 2 * 100 * 8 * 2048 * 4
