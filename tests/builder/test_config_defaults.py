"""A key that config.json leaves out means what it means in transformers' class, or is refused."""

from dataclasses import fields
from typing import Any

import pytest

from mtpbuild.builder.models import find_family
from mtpbuild.builder.models.common.rope import compute_inverse_frequencies, compute_table_scale
from mtpbuild.runtime.errors import CheckpointError

CLASSES = {
    "deepseek_v3": "DeepseekV3ForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM", "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"num_attention_heads": 64},  # the class's 96 give heads of 42
    "mistral": {"sliding_window": None},
}
# The tensors tell how many modules there are.
COUNTED = {"num_nextn_predict_layers"}


def make_usual(kind: str, **given: Any) -> Any:
    """Make a configuration of transformers' class from its defaults."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**{**OTHER_SIZES.get(kind, {}), **given})


def parse(kind: str, raw: dict[str, Any], *without: str) -> Any:
    names = {"architectures": [CLASSES[kind]], "model_type": kind}
    raw = {key: value for key, value in raw.items() if key not in without} | names
    return find_family(raw).config.parse(raw)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_key_that_is_left_out(kind: str) -> None:
    """Each key alone, and all together that may be left out."""
    theirs = make_usual(kind)
    raw = theirs.to_dict()
    whole, optional = parse(kind, raw), list[str]()
    shared = {each.name for each in fields(whole) if hasattr(theirs, each.name)} - COUNTED
    assert len(shared) > 8
    assert [n for n in shared if getattr(whole, n) != getattr(theirs, n)] == []
    for key in raw.keys() - COUNTED:
        try:
            without = parse(kind, raw, key)
        except CheckpointError as error:
            without = str(error)
        assert without in (whole, f"{key} is missing")
        optional += [key] if without == whole else []
    assert parse(kind, raw, *optional) == whole
    known = {"rms_norm_eps", "rope_parameters", "num_experts_per_tok", "routed_scaling_factor"}
    assert known & raw.keys() <= {*optional}


YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 3.0, "beta_slow": 0.5}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("beside", [{}, {"original_max_position_embeddings": 32}])
@pytest.mark.parametrize("more", [{}, {"mscale": 0.7, "mscale_all_dim": 0.9}, {"truncate": False}])
def test_of_two_spellings_the_old_one_wins(
    kind: str, more: dict[str, Any], beside: dict[str, int]
) -> None:
    """It wins whole: the other one's theta and share of a head count for nothing."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    old = {"rope_type": "yarn", **YARN, **more}
    new = {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.75}
    both = {"rope_scaling": dict(old), "rope_parameters": dict(new)}
    theirs = make_usual(kind, rope_scaling=dict(old), rope_parameters=dict(new), **beside)
    wanted, scale = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    ours = parse(kind, make_usual(kind).to_dict() | both | beside)
    width = getattr(ours, "rotary_dim", getattr(ours, "qk_rope_head_dim", 0))
    assert 2 * len(wanted) == width
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"] == 10000.0
    got = compute_inverse_frequencies(ours.rope, width)
    assert got.tolist() == pytest.approx(wanted.tolist(), rel=1e-6)
    assert compute_table_scale(ours.rope) == pytest.approx(scale)
    assert parse(kind, make_usual(kind).to_dict() | {"rope_parameters": new}).rope.theta == 777
