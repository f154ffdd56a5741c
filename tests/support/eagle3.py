"""EAGLE-3 heads in three dialects, for trunks of any family."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.models.common.weight import convert_weights, join_slices
from mtpbuild.builder.plan.recipe import FoundModel
from mtpbuild.builder.program.opened_model import open_model
from mtpbuild.builder.weights.head import read_head_config
from tests.reference.eagle3 import LAYER, TAPS, PlainEagle3, make_head
from tests.support.families import make_family, save_family
from tests.support.opened import NO_IDS

Change = dict[str, Any]
# What a head's values are, whether it has an embedding of its own, and how its maker writes them.
DIALECTS: dict[str, tuple[Change, bool, str]] = {
    "eagle": ({TAPS: [0, 1, 2], "draft_vocab_size": 45}, False, "midlayer"),
    "own embedding": ({TAPS: [0, 1, 2], "draft_vocab_size": 56}, True, "midlayer"),
    "specforge": ({TAPS: [1], "norm_before_fc": True}, True, "midlayer"),
    "speculators": (
        {TAPS: [0, 2, 1], "norm_before_residual": True, "norm_output": True, "fc_norm": True,
         "draft_vocab_size": 40},
        False,
        "layers.0",
    ),
    "no taps": (
        {"use_aux_hidden_state": False, TAPS: [], "norm_before_fc": True},
        False,
        "midlayer",
    ),
    "narrow": ({TAPS: [1, 2], "hidden_size": 20, "head_dim": 6, "draft_vocab_size": 50}, True,
               "midlayer"),
}  # fmt: skip


def save_head(
    folder: Path, dialect: str, trunk: PlainCausalLM
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a head as its maker does; return its values and its weights by plain names."""
    changes, embeds, _ = DIALECTS[dialect]
    width = trunk.config.hidden_size
    raw = LAYER | {"hidden_size": width, "target_hidden_size": width} | changes
    weights = make_head(trunk, raw, embeds)
    folder.mkdir(parents=True)
    save_weights(folder, dialect, weights)
    stored: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], **raw}
    if dialect == "speculators":
        layer = {name: raw[name] for name in LAYER}
        own = {name: value for name, value in raw.items() if name not in LAYER}
        stored = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, **own}
    if dialect == "no taps":
        stored["eagle_config"] = {"use_aux_hidden_state": stored.pop("use_aux_hidden_state")}
    (folder / "config.json").write_text(json.dumps(stored))
    return raw, weights


def save_weights(folder: Path, dialect: str, weights: dict[str, Tensor]) -> None:
    prefix = DIALECTS[dialect][2]
    named = {name.replace("layers.0", prefix): weight for name, weight in weights.items()}
    if "d2t" in weights:
        named["t2d"] = torch.zeros(LAYER["vocab_size"], dtype=torch.bool)
    save_file(named, folder / "model.safetensors")


def load_with_head(
    place: Path, name: str, dialect: str, train: Callable[[PlainEagle3], None] | None = None
) -> tuple[CausalLM, PlainEagle3]:
    """Return the program's model of a trunk with a head, and the plain one.

    train: changes the plain one's weights.
    """
    trunk = make_family(name)
    folder = save_family(place / name, name, trunk)
    raw, weights = save_head(place / "head", dialect, trunk)
    config = read_head_config(place / "head", folder, load_config(folder))
    plain = PlainEagle3(trunk, config, raw, weights)
    if train is not None:
        train(plain)
        save_family(folder, name, trunk)
        save_weights(place / "head", dialect, weights)
    model = open_model(
        FoundModel("x", "x", folder, place / "head"),
        config,
        NO_IDS,
        GraphStyle(),
        draft_ids=config.draft_ids,
    )
    program = model.model
    values = dict(join_slices(convert_weights(model.checkpoint, model.table)))
    program.load_state_dict(values, assign=True, strict=True)
    return program.eval(), plain
