"""The models that `one_machine.py` measures, in published shapes.

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
    raw = of_recipe(recipe)
    every = raw["num_hidden_layers"]
    count = every if layers is None else min(layers, every)
    return Shape(recipe, raw | {"num_hidden_layers": count}, weights, count == every)


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
