"""DFlash and DSpark heads: every step's drafts against a recompute, and planted faults."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.models.common.weight import convert_weights, join_slices
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.recipe import FoundModel
from mtpbuild.builder.program.opened_model import open_model
from mtpbuild.builder.weights.head import read_head_config
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.errors import CheckpointError
from tests.reference.dflash import MASK, SIZES, SLIDING, PlainBlockHead, make_head
from tests.support.families import make_family, save_family
from tests.support.invoke import refusal
from tests.support.opened import NO_IDS
from tests.support.requests import build, build_request
from tests.support.steps import CHUNK, check_steps

Change = dict[str, Any]
TAPS = {"target_layer_ids": [0], "mask_token_id": MASK}
WINDOW = {"layer_types": [SLIDING, "full_attention"], "sliding_window": 6, "use_sliding_window": True}
FORMS: dict[str, Change] = {
    "dflash": {"block_size": 5},
    "windows": {"block_size": 5, **WINDOW},
    "dspark": {"block_size": 4, "markov_rank": 6},
}
CLASSES = {"dspark": "Qwen3DSparkModel"}
FULL = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def save_head(
    folder: Path, form: str, trunk: PlainCausalLM, changes: Change | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a head as its makers do; return its values and its weights."""
    raw: dict[str, Any] = SIZES | {"hidden_size": trunk.config.hidden_size} | FORMS[form]
    raw |= {"dflash_config": TAPS} | (changes or {})
    raw["architectures"] = [CLASSES.get(form, "DFlashDraftModel")]
    folder.mkdir(parents=True)
    weights = make_head(trunk, raw)
    copies = {"lm_head.weight": trunk.lm_head.weight.data.clone()} if form == "dspark" else {}
    save_file(weights | copies, folder / "model.safetensors")
    # DeepSpec's have all values at the top.
    stored = raw | {"dflash_config": None} | TAPS if form == "dspark" else raw
    (folder / "config.json").write_text(json.dumps(stored))
    return raw, weights


def load_with_head(place: Path, name: str, form: str) -> tuple[CausalLM, PlainBlockHead]:
    """Return the program's model of a trunk with a head, and the plain one."""
    trunk = make_family(name)
    folder = save_family(place / name, name, trunk)
    raw, weights = save_head(place / "head", form, trunk)
    config = read_head_config(place / "head", folder, load_config(folder))
    source = FoundModel("x", "x", folder, place / "head")
    model = open_model(source, config, NO_IDS, GraphStyle())
    values = dict(join_slices(convert_weights(model.checkpoint, model.table)))
    model.model.load_state_dict(values, assign=True, strict=True)
    return model.model.eval(), PlainBlockHead(trunk, config, raw, weights)


def check(model: CausalLM, reference: PlainBlockHead, nextn: int = 3, **how: Any) -> None:
    plan = Plan(model.config, nextn, "mtp-block", 1, 200, CHUNK, **how)
    check_steps(plan, model, reference, accepts_all=False)


CASES = [("qwen3.5", "dspark", 4), ("qwen3", "windows", 3)]
OTHERS = [
    ("qwen3.5", "dflash", 4), ("qwen3.5", "windows", 2), ("qwen3", "dspark", 1),
    ("gigachat", "dflash", 1), ("llama", "dspark", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "form", "nextn"), [*CASES, *(pytest.param(*case, marks=FULL) for case in OTHERS)]
)
def test_drafts_are_those_of_a_recompute(
    name: str, form: str, nextn: int, tmp_path: Path
) -> None:
    """With each number of accepted drafts; the head's rows are those of a fresh prompt."""
    check(*load_with_head(tmp_path, name, form), nextn)


def test_any_number_of_drafts_in_a_step(tmp_path: Path) -> None:
    check(*load_with_head(tmp_path, "qwen3", "dspark"), adaptive=True)
