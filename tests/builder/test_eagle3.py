"""EAGLE-3 heads in three dialects: every step's drafts against a recompute, and planted faults."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.models.common.weight import convert_weights, join_slices
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.weights.head import read_head_config
from tests.reference.eagle3 import PlainEagle3, make_head
from tests.support.families import make_family, save_family
from tests.support.steps import CHUNK, check_steps

LAYER = {
    "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 5000, "vocab_size": 61,
    "max_position_embeddings": 256, "hidden_act": "silu", "num_hidden_layers": 1,
}  # fmt: skip
TAPS = "eagle_aux_hidden_state_layer_ids"
Change = dict[str, Any]
# What a head's values are, whether it has an embedding of its own, and how its maker writes them.
DIALECTS: dict[str, tuple[Change, bool, str]] = {
    "eagle": ({TAPS: [0, 1, 2], "draft_vocab_size": 45}, False, "midlayer"),
    "specforge": ({TAPS: [1], "norm_before_fc": True}, True, "midlayer"),
    "speculators": (
        {TAPS: [0, 2, 1], "norm_before_residual": True, "norm_output": True, "fc_norm": True,
         "draft_vocab_size": 40},
        False,
        "layers.0",
    ),
    "no taps": ({"use_aux_hidden_state": False, TAPS: []}, False, "midlayer"),
    "narrow": ({TAPS: [1, 2], "hidden_size": 20, "head_dim": 6, "draft_vocab_size": 50}, True,
               "midlayer"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def save_head(
    folder: Path, dialect: str, trunk: PlainCausalLM
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a head as its maker does; return its values and its weights by plain names."""
    changes, embeds, prefix = DIALECTS[dialect]
    raw = LAYER | {"target_hidden_size": trunk.config.hidden_size} | changes
    weights = make_head(trunk, raw, embeds)
    folder.mkdir(parents=True)
    named = {name.replace("layers.0", prefix): weight for name, weight in weights.items()}
    if "d2t" in weights:
        named["t2d"] = torch.zeros(trunk.config.vocab_size, dtype=torch.bool)
    save_file(named, folder / "model.safetensors")
    stored: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], **raw}
    if dialect == "speculators":
        layer = {name: raw[name] for name in LAYER}
        own = {name: value for name, value in raw.items() if name not in LAYER}
        stored = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, **own}
    if dialect == "no taps":
        stored["eagle_config"] = {"use_aux_hidden_state": stored.pop("use_aux_hidden_state")}
    (folder / "config.json").write_text(json.dumps(stored))
    return raw, weights


def load_with_head(place: Path, name: str, dialect: str) -> tuple[CausalLM, PlainEagle3]:
    """Return the program's model of a trunk with a head, and the plain one."""
    trunk = make_family(name)
    folder = save_family(place / name, name, trunk)
    raw, weights = save_head(place / "head", dialect, trunk)
    config = read_head_config(place / "head", folder, load_config(folder))
    from mtpbuild.builder.graph.style import GraphStyle
    from mtpbuild.builder.plan.recipe import FoundModel
    from mtpbuild.builder.program.opened_model import open_model
    from tests.support.opened import NO_IDS

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
    return program.eval(), PlainEagle3(trunk, model.config, raw, weights)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_drafts_are_those_of_a_recompute(dialect: str, tmp_path: Path) -> None:
    model, reference = load_with_head(tmp_path, "qwen3", dialect)
    plan = Plan(reference.config, 3, "mtp-eagle", 1, 200, CHUNK, draft_ids=model.config.draft_ids)
    check_steps(plan, model, reference, accepts_all=False)
