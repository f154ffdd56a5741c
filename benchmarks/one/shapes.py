"""The models that `one_machine.py` measures, in published shapes.

Weights are random: only a model's shape and the format of its weights matter here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtpbuild.builder.models import ModelConfig, find_family
from mtpbuild.builder.models.heads import join_config
from mtpbuild.builder.plan.recipe import find_recipe
from mtpbuild.builder.weights.scheme import SCHEMES, UNQUANTISED, Scheme, make_scheme

MOE, DENSE = "gigachat3-10b-a1.8b-bf16", "mimo-7b-rl"  # recipes
WINDOWED = ("gemma-4-12b", "gemma-4-26b-a4b")
HYBRIDS = ("qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b")
GGUF = {"fp32": "f32", "int8": "q8_0", "int4": "q4_0"}  # our format -> llama.cpp's counterpart


@dataclass(frozen=True)
class Shape:
    """A model to write: its config.json, and the format of its products.

    head: config.json of the head that is published apart, if it has one. int8: globs of modules
    that are int8 whatever the others are.
    """

    name: str
    raw: Mapping[str, Any]
    weights: str  # a key of GGUF
    whole: bool  # no layer was left out
    head: Mapping[str, Any] | None = None
    int8: tuple[str, ...] = ()

    @property
    def config(self) -> ModelConfig:
        return find_family(dict(self.raw)).config.parse(self.raw)

    @property
    def joined(self) -> ModelConfig:
        """Return the configuration with the head."""
        return self.config if self.head is None else join_config(self.config, self.head)

    @property
    def scheme(self) -> Scheme:
        """Return the scheme of `mtpbuild quantize --to int4 --head int8`; fp32 engines use bf16."""
        if self.weights == "fp32":
            return SCHEMES[UNQUANTISED]
        return replace(make_scheme(self.weights, None, None, "int8"), int8_modules=self.int8)

    @property
    def gguf(self) -> str:
        return GGUF[self.weights]


def published(
    recipe: str,
    layers: int | None,
    weights: str = "int4",
    changes: Mapping[str, Any] | None = None,
    int8: tuple[str, ...] = (),
) -> Shape:
    """Return a recipe's shape with at most its first `layers` layers.

    changes: values in place of its configuration's. int8: as in `Shape`.
    """
    raw = read_recipe(recipe, "config.json")
    assert raw is not None
    raw = unwrap(raw) | dict(changes or {})
    every = raw["num_hidden_layers"]
    count = every if layers is None else min(layers, every)
    cut: dict[str, Any] = {"num_hidden_layers": count}
    if "layer_types" in raw:
        cut["layer_types"] = raw["layer_types"][:count]
        if "sliding_attention" in cut["layer_types"]:
            cut["layer_types"][-1] = "full_attention"  # as the family reads it
    head = read_recipe(recipe, "head.json")
    return Shape(recipe, raw | cut, weights, count == every and not changes, head, int8)


def read_recipe(recipe: str, name: str) -> dict[str, Any] | None:
    """Read a JSON file of a recipe, if it has it."""
    found = find_recipe(recipe)
    assert found is not None
    path = found.config_folder / name
    raw: dict[str, Any] | None = None
    if path.exists():
        raw = json.loads(path.read_text(encoding="utf-8"))
    return raw


def unwrap(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text model alone."""
    if "text_config" not in raw:
        return raw
    architectures = [
        name.replace("ConditionalGeneration", "CausalLM") for name in raw["architectures"]
    ]
    return raw["text_config"] | {"architectures": architectures}
