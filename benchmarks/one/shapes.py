"""The models that `one_machine.py` measures: published shapes, and a small one with many experts.

Weights are random: only a model's shape and the format of its weights matter here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtpbuild.builder.models import ModelConfig, find_family
from mtpbuild.builder.plan.recipe import find_recipe
from mtpbuild.builder.weights.scheme import SCHEMES, UNQUANTISED, Scheme, make_scheme

MOE, DENSE = "gigachat3-10b-a1.8b-bf16", "mimo-7b-rl"  # recipes
HYBRIDS = ("qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b")
# MOE's 64 experts at half the width: 0.95 billion parameters.
SMALL = {
    "hidden_size": 768,
    "intermediate_size": 4480,
    "moe_intermediate_size": 640,
    "num_hidden_layers": 9,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 96,
    "vocab_size": 32768,
}
GGUF = {"fp32": "f32", "int8": "q8_0", "int4": "q4_0"}  # our format -> llama.cpp's counterpart


@dataclass(frozen=True)
class Shape:
    """A model to write: its config.json, and the format of its products."""

    name: str
    raw: Mapping[str, Any]
    weights: str  # a key of GGUF
    whole: bool  # no layer was left out

    @property
    def config(self) -> ModelConfig:
        return find_family(dict(self.raw)).config.parse(self.raw)

    @property
    def scheme(self) -> Scheme:
        """Return the scheme of `mtpbuild quantize --to int4 --head int8`; fp32 engines use bf16."""
        if self.weights == "fp32":
            return SCHEMES[UNQUANTISED]
        return make_scheme(self.weights, None, None, "int8")

    @property
    def gguf(self) -> str:
        return GGUF[self.weights]


def published(recipe: str, layers: int | None, weights: str = "int4") -> Shape:
    """Return a recipe's shape with at most its first `layers` layers."""
    return cut(recipe, of_recipe(recipe), layers, weights)


def small(layers: int | None, weights: str) -> Shape:
    return cut("0.95B, 64 experts", of_recipe(MOE) | SMALL, layers, weights)


def cut(name: str, raw: dict[str, Any], layers: int | None, weights: str) -> Shape:
    every = raw["num_hidden_layers"]
    count = every if layers is None else min(layers, every)
    return Shape(name, raw | {"num_hidden_layers": count}, weights, count == every)


def of_recipe(name: str) -> dict[str, Any]:
    """Return the configuration of a recipe's text model, without its wrapper."""
    recipe = find_recipe(name)
    assert recipe is not None
    text = (recipe.config_folder / "config.json").read_text(encoding="utf-8")
    raw: dict[str, Any] = json.loads(text)
    if "text_config" not in raw:
        return raw
    architectures = [
        name.replace("ConditionalGeneration", "CausalLM") for name in raw["architectures"]
    ]
    return raw["text_config"] | {"architectures": architectures}
