"""config.json: both Hugging Face spellings, the real DeepSeek-V3, YaRN's numbers, every refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.builder.checkpoint.config import COUNT_LIMIT, SIZE_LIMIT, RopeConfig
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.rope import (
    compute_inverse_frequencies,
    compute_rope_tables,
    compute_table_scale,
    softmax_scale,
)
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.runtime.errors import CheckpointError
from tests.support.checkpoints import BASE, SHAPES

REAL = Path(__file__).parents[1] / "data" / "deepseek-v3-config.json"


@pytest.fixture
def real() -> DeepseekV3Config:
    return DeepseekV3Config.parse(json.loads(REAL.read_text()))


def base(*without: str, **overrides: Any) -> dict[str, Any]:
    return {k: v for k, v in (BASE | overrides).items() if k not in without}


def test_the_real_configuration(real: DeepseekV3Config) -> None:
    assert real == DeepseekV3Config(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        moe_layers=(False,) * 3 + (True,) * 59,
        num_nextn_predict_layers=1,
        rms_norm_eps=1e-6,
        max_position_embeddings=163840,
        rope_interleave=True,
        tie_word_embeddings=False,
        rope=RopeConfig(
            theta=10000.0,
            kind="yarn",
            factor=40.0,
            original_max_position_embeddings=4096,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    )
    assert real.cache_dim == 576
    assert [real.is_moe(i) for i in (0, 2, 3, 60, 61)] == [False, False, True, True, True]


def test_yarn_of_the_real_model(real: DeepseekV3Config) -> None:
    """Values that were computed from YaRN's formulas."""
    frequencies = compute_inverse_frequencies(real.rope, real.qk_rope_head_dim)
    wanted = {
        0: 1.0,
        10: 0.0562341,
        11: 0.0390069,
        16: 0.0055,
        22: 1.77828e-4,
        23: 3.33380e-5,
        31: 3.33380e-6,
    }
    for i, value in wanted.items():
        assert frequencies[i].item() == pytest.approx(value, rel=5e-6), i
    assert softmax_scale(real.rope, real.qk_head_dim) == pytest.approx(0.1352337789, rel=1e-9)
    assert compute_table_scale(real.rope) == 1.0


def test_rope_kinds() -> None:
    plain = RopeConfig()
    torch.testing.assert_close(compute_inverse_frequencies(plain, 4), torch.tensor([1.0, 0.01]))
    linear = RopeConfig(kind="linear", factor=4.0)
    torch.testing.assert_close(compute_inverse_frequencies(linear, 4), torch.tensor([0.25, 0.0025]))
    assert compute_table_scale(RopeConfig(kind="yarn", factor=8.0)) == pytest.approx(1.2079442)
    assert compute_table_scale(RopeConfig(kind="yarn", factor=8.0, attention_factor=0.5)) == 0.5
    half = RopeConfig(kind="yarn", factor=8.0, mscale=0.5, mscale_all_dim=1.0)
    assert compute_table_scale(half) == pytest.approx(1.1039721 / 1.2079442)


def test_tables_start_at_position_zero(real: DeepseekV3Config) -> None:
    cos, sin = compute_rope_tables(real.rope, real.qk_rope_head_dim, 3)
    assert cos.shape == sin.shape == (3, 32)
    assert cos[0].eq(1).all()
    assert sin[0].eq(0).all()
    assert cos[2, 0].item() == pytest.approx(-0.4161468)


def test_old_and_new_spelling_are_equal() -> None:
    old = base(rope_theta=50000, rope_scaling={"type": "yarn", "factor": 4, "mscale": 0.7})
    rope = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "mscale": 0.7}
    new = base("rope_theta", "rope_scaling", rope_parameters=rope)
    assert DeepseekV3Config.parse(old) == DeepseekV3Config.parse(new)
    assert DeepseekV3Config.parse(new).rope.theta == 50000.0
    plain = base("rope_scaling", rope_theta=1234.5)
    parameters = {"rope_type": "default", "rope_theta": 1234.5}
    assert DeepseekV3Config.parse(plain) == DeepseekV3Config.parse(
        base("rope_theta", "rope_scaling", rope_parameters=parameters)
    )

    optional = ["n_shared_experts", "norm_topk_prob", "first_k_dense_replace"]
    optional += ["num_nextn_predict_layers", "tie_word_embeddings", "rope_scaling", "rope_theta"]
    absent = DeepseekV3Config.parse(base(*optional))
    assert absent == DeepseekV3Config.parse(base(**dict.fromkeys(optional)))
    assert (absent.n_shared_experts, absent.moe_layers) == (1, (False,) * 3)
    assert DeepseekV3Config.parse(base("q_lora_rank")).q_lora_rank == 1536
    assert DeepseekV3Config.parse(base(q_lora_rank=None)).q_lora_rank is None
    assert absent.rope == RopeConfig(original_max_position_embeddings=256)


def test_yarn_factor_follows_from_the_lengths() -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 64}
    assert DeepseekV3Config.parse(base(rope_scaling=scaling)).rope.factor == 4.0


@pytest.mark.parametrize("shape", SHAPES)
def test_unknown_keys_are_ignored(shape: str) -> None:
    raw = {k: v for k, v in (BASE | SHAPES[shape]).items() if v is not None}
    extra: dict[str, Any] = {
        "auto_map": {},
        "quantization_config": None,
        "use_cache": True,
        "torch_dtype": "x",
    }
    assert DeepseekV3Config.parse(raw) == DeepseekV3Config.parse(raw | extra)


REQUIRED = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
REQUIRED += ["num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"]
REQUIRED += ["v_head_dim", "max_position_embeddings"]
YARN = BASE["rope_scaling"]
# What is wrong, and what its line must say.
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    (base("architectures", "model_type"), "unsupported architecture none"),
    (base(model_type="gpt2", architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel; supported"),
    (base(rope_scaling=LLAMA3 | {"low_freq_factor": 4.0}), "low_freq_factor 4 must be below"),
    (base(rope_scaling={"rope_type": "llama3"}), "factor of rope type 'llama3' is missing"),
    (base("architectures", model_type="deepseek_v2"), "deepseek_v2; supported: DeepseekV3"),
    (base(architectures="DeepseekV3ForCausalLM"), "architectures must be a list"),
    (base(architectures=[["DeepseekV3ForCausalLM"]]), "architectures must be a list"),
    (base(hidden_act="gelu"), "hidden_act 'gelu' is not supported; supported: 'silu'"),
    (base(scoring_func="softmax"), "scoring_func 'softmax' is not supported"),
    (base(topk_method="greedy"), "topk_method 'greedy' is not supported"),
    (base(attention_bias=True), "attention_bias"),
    *((base(key), f"{key} is missing") for key in REQUIRED),
    *((base(**{key: "12"}), f"{key} must be an integer") for key in REQUIRED),
    *(
        (base(**{key: 0}), f"{key} must be an integer of {1 + ('rope' in key)}..")
        for key in REQUIRED
    ),
    (base(hidden_size=True), "hidden_size must be an integer"),
    (base(hidden_size=32.0), "hidden_size must be an integer"),
    (base(vocab_size=SIZE_LIMIT + 1), "vocab_size must be an integer"),
    (base(num_hidden_layers=COUNT_LIMIT + 1), "num_hidden_layers must be an integer"),
    (base(n_routed_experts=10**9), "n_routed_experts must be an integer"),
    (base(num_nextn_predict_layers=10**9), "num_nextn_predict_layers must be an integer"),
    (base(num_nextn_predict_layers=-1), "num_nextn_predict_layers must be an integer"),
    (base(q_lora_rank=0), "q_lora_rank must be an integer"),
    (base(moe_layer_freq=[0, 1, 1]), "moe_layer_freq must be an integer"),
    (base(norm_topk_prob="false"), "norm_topk_prob must be true or false"),
    (base(rope_interleave=1), "rope_interleave must be true or false"),
    (base(tie_word_embeddings="no"), "tie_word_embeddings must be true or false"),
    (base(routed_scaling_factor="2.5"), "routed_scaling_factor must be a number"),
    (base(routed_scaling_factor=float("nan")), "routed_scaling_factor must be a number"),
    (base(routed_scaling_factor=True), "routed_scaling_factor must be a number"),
    (base(routed_scaling_factor=10**400), "routed_scaling_factor must be a number"),
    (base(rms_norm_eps=-1e-6), "rms_norm_eps must be a number above 0"),
    (base(qk_rope_head_dim=5), "qk_rope_head_dim 5 must be even"),
    (base(n_group=3), "n_routed_experts 8 must split into n_group 3"),
    (base(n_group=8), "groups of at least 2"),
    (base(topk_group=5), "topk_group 5 exceeds n_group 4"),
    (base(num_experts_per_tok=5), "num_experts_per_tok 5 exceeds the 4 experts of topk_group 2"),
    (base(rope_scaling="yarn"), "rope_scaling"),
    (base(rope_scaling={"type": "longrope"}), "rope type 'longrope' is not supported"),
    (base(rope_scaling={"type": "linear"}), "factor of rope type 'linear' is missing"),
    (base(rope_scaling={"full_attention": YARN}), "must be a flat object or null"),
    (base(rope_theta="big"), "rope_theta must be a number"),
    (base(rope_theta=1), "rope_theta must be a number above 1"),
    (base(rope_scaling=YARN | {"factor": 0}), "factor must be a number above 0"),
    (base(rope_scaling=YARN | {"factor": [4]}), "factor must be a number above 0"),
    (base(rope_scaling=YARN | {"beta_fast": 0}), "beta_fast must be a number above 0"),
    (base(rope_scaling=YARN | {"beta_slow": -1}), "beta_slow must be a number above 0"),
    (base(rope_scaling=YARN | {"mscale_all_dim": -40}), "mscale_all_dim must be a number"),
    (base(rope_scaling=YARN | {"attention_factor": "1"}), "attention_factor must be a number"),
    (base(rope_scaling=YARN | {"truncate": "yes"}), "truncate must be true or false"),
    (
        base(rope_scaling=YARN | {"original_max_position_embeddings": 0}),
        "original_max_position_embeddings must be an integer",
    ),
]


@pytest.mark.parametrize(("raw", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_refusals_name_the_file_and_the_key(raw: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as caught:
        load_config(tmp_path)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'config.json'}: ")
    assert says in line
    assert "\n" not in line
    assert len(line) < 600 + len(str(tmp_path))


TEXTS = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"]


@pytest.mark.parametrize(
    ("text", "says"),
    [*((text, ": not valid JSON") for text in TEXTS), (b"[]", ": expected a JSON object")],
    ids=["empty", "cut", "not utf-8", "deep", "huge number", "list"],
)
def test_text_that_is_no_object(text: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=rf"config\.json{says}"):
        load_config(tmp_path)


def test_no_configuration_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json; give a Hugging Face checkpoint"):
        load_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: can't be read \(Is a directory\)"):
        load_config(tmp_path)
