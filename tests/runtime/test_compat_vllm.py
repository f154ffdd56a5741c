"""vLLM's --speculative-config: what is taken, what is refused and with which words."""

import json
from typing import Any

import pytest

from mtpbuild.runtime.configuration.read import parse_speculative_config
from mtpbuild.runtime.configuration.settings import Configuration
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.sampling.synthetic import choose_synthetic_rates

# The vocabulary is written out: a name that vanishes from the code has to fail here.
ALIASES = [
    "bailing_hybrid_mtp", "bailing_hybrid_v3_mtp", "deepseek_mtp", "dots3_note_mtp", "ernie_mtp",
    "exaone4_5_mtp", "exaone_moe_mtp", "gemma4_mtp", "glm4_moe_lite_mtp", "glm4_moe_mtp",
    "glm5_next_mtp", "glm_ocr_mtp", "hy_v3_mtp", "hy_v4_mtp", "inkling_mtp", "kimi_k3_mtp",
    "longcat_flash_mtp", "mimo_mtp", "mimo_v2_mtp", "minimax_m3_mtp", "nemotron_h_mtp",
    "pangu_ultra_moe_mtp", "qwen3_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp", "step3p5_mtp",
]  # fmt: skip
OTHER_METHODS = [
    "custom_class", "dflash", "draft_model", "dspark", "eagle", "eagle3", "extract_hidden_states",
    "medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix",
]  # fmt: skip
NO_EFFECT = [
    "attention_backend", "code_revision", "disable_eagle_block_drop", "disable_logprobs",
    "disable_mqa_scorer", "disable_padded_drafter_batch", "draft_load_config", "dspark_draft_topk",
    "enable_adaptive_verification", "enforce_eager", "index_share_for_mtp_iteration",
    "kv_cache_dtype", "max_model_len", "model", "moe_backend", "parallel_drafting",
    "prompt_lookup_max", "prompt_lookup_min", "quantization", "revision",
    "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_max_tree_depth", "suffix_decoding_min_token_prob", "use_heterogeneous_vocab",
    "use_local_argmax_reduction",
]  # fmt: skip
REFUSED = [
    "disable_by_batch_size", "num_speculative_tokens_per_batch_size", "speculative_token_tree",
]  # fmt: skip
SYNTHETIC = {"method": "mtp", "rejection_sample_method": "synthetic"}


def in_json(**keys: Any) -> str:
    return json.dumps(keys)


def refused_json(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_speculative_config(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ('{"method": "mtp", "num_speculative_tokens": 3}', {"nextn": 3}),
        ('{"method": "MTP", "num_speculative_tokens": 15}', {"nextn": 15}),
        ('{"num_speculative_tokens": 0}', {"nextn": 0}),
        ("{}", {}),
        ('{"method": null, "num_speculative_tokens": null}', {}),
        ('{"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}',
         {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}),
        ('{"rejection_sample_method": "standard", "draft_sample_method": "greedy"}',
         {"rejection_sample_method": "standard", "draft_sample_method": "greedy"}),
        (in_json(**SYNTHETIC, synthetic_acceptance_rates=[1, 0.5]),
         {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (1.0, 0.5)}),
        (in_json(**SYNTHETIC, synthetic_acceptance_length=2.5, num_speculative_tokens=3),
         {"nextn": 3, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}),
        ('{"draft_tensor_parallel_size": 1, "disable_by_batch_size": null}', {}),
        ('{"draft_tensor_parallel_size": 8}', {"tp": 8}),
        ('{"speculative_token_tree": "", "draft_tensor_parallel_size": -1}', {}),
    ],
)  # fmt: skip
def test_vllm(text: str, settings: Configuration) -> None:
    assert parse_speculative_config(text) == settings


@pytest.mark.parametrize("alias", ALIASES)
def test_older_method_names(alias: str) -> None:
    line = f"--speculative-config: method '{alias}' is deprecated: write 'mtp'"
    found = parse_speculative_config(in_json(num_speculative_tokens=1, method=alias))
    assert found == {"nextn": 1, "notes": (line,)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON at its end"),
        ('{"method": "mtp"', "not JSON at its end"),
        ("method=mtp", "not JSON at character 1, 'method=mtp'"),
        ("{'method': 'mtp'}", "JSON writes double quotes, not '"),
        ('{"a": True}', "not JSON at character 7, 'True}': JSON writes true, not True"),
        ('{"a": None}', "not JSON at character 7, 'None}': JSON writes null, not None"),
        ("[" * 100_000, "not JSON, nested too deep"),
        ("3", "must be an object of keys and values, not 3"),
        ('["mtp"]', "must be an object of keys and values, not ['mtp']"),
        ('{"method": "mtp", "method": "mtp"}', "'method' is given twice"),
        ('{"num_speculative_tokens": 16}',
         "num_speculative_tokens must be a whole number in 0..15, not 16"),
        ('{"num_speculative_tokens": "3"}',
         "num_speculative_tokens must be a whole number in 0..15, not '3'"),
        ('{"num_speculative_tokens": true}',
         "num_speculative_tokens must be a whole number in 0..15, not True"),
        ('{"num_speculative_token": 3}',
         "unknown key 'num_speculative_token'; did you mean 'num_speculative_tokens'?"),
        ('{"max_draft_len": 3}',
         "unknown key 'max_draft_len'; did you mean 'num_speculative_tokens'?"),
        ('{"methud": "mtp"}', "unknown key 'methud'; did you mean 'method'?"),
        ('{"nextn": 3}', "unknown key 'nextn'; did you mean 'num_speculative_tokens'?"),
        ('{"tensor_parallel_size": 8}',
         "unknown key 'tensor_parallel_size'; did you mean 'draft_tensor_parallel_size'?"),
        ('{"zzz": 3}',
         "unknown key 'zzz'; known: method, num_speculative_tokens, draft_tensor_parallel_size, "
         "rejection_sample_method, draft_sample_method, synthetic_acceptance_rates, "
         "synthetic_acceptance_length"),
        ('{"rejection_sample_method": "exact"}',
         "rejection_sample_method must be one of standard, block, synthetic, not 'exact'"),
        ('{"draft_sample_method": 1}',
         "draft_sample_method must be one of probabilistic, greedy, not 1"),
        (in_json(**SYNTHETIC),
         "rejection_sample_method 'synthetic' needs exactly one of synthetic_acceptance_rates "
         "and synthetic_acceptance_length"),
        (in_json(**SYNTHETIC, synthetic_acceptance_rates=[1], synthetic_acceptance_length=2),
         "rejection_sample_method 'synthetic' needs exactly one of synthetic_acceptance_rates "
         "and synthetic_acceptance_length"),
        ('{"synthetic_acceptance_rates": [1]}',
         "synthetic_acceptance_rates needs rejection_sample_method 'synthetic'"),
        ('{"rejection_sample_method": "block", "synthetic_acceptance_length": 2}',
         "synthetic_acceptance_length needs rejection_sample_method 'synthetic'"),
        (in_json(**SYNTHETIC, synthetic_acceptance_rates=[0.5, 0.6]),
         "synthetic_acceptance_rates must not increase, as in [0.5, 0.6]"),
        (in_json(**SYNTHETIC, synthetic_acceptance_rates=[1.5]),
         "synthetic_acceptance_rates must be a number in 0..1, not 1.5"),
        (in_json(**SYNTHETIC, synthetic_acceptance_rates=[]),
         "synthetic_acceptance_rates must be a list of rates, not []"),
        (in_json(**SYNTHETIC, synthetic_acceptance_length=0.5),
         "synthetic_acceptance_length must be a number in 1..16, not 0.5"),
        ('{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": NaN}',
         "synthetic_acceptance_length must be a number in 1..16, not nan"),
    ],
)  # fmt: skip
def test_vllm_refused(text: str, says: str) -> None:
    line = refused_json(text)
    assert line.startswith("--speculative-config: ")
    assert line.endswith(says)


def test_synthetic_rates_and_nextn_of_one_configuration() -> None:
    rates = in_json(**SYNTHETIC, num_speculative_tokens=3, synthetic_acceptance_rates=[1, 0])
    assert refused_json(rates) == (
        "synthetic_acceptance_rates has 2 rates, nextn is 3: one for each"
    )
    length = in_json(**SYNTHETIC, num_speculative_tokens=3, synthetic_acceptance_length=4.5)
    assert refused_json(length) == "synthetic_acceptance_length 4.5 is outside 1..4"


@pytest.mark.parametrize(
    ("length", "wanted"),
    [(1, (0, 0, 0)), (1.25, (0.25, 0, 0)), (2, (1, 0, 0)), (3.5, (1, 1, 0.5)), (4, (1, 1, 1))],
)
def test_a_synthetic_length_becomes_rates(length: float, wanted: tuple[float, ...]) -> None:
    assert choose_synthetic_rates(None, length, 3) == wanted
    assert 1 + sum(wanted) == length


@pytest.mark.parametrize("key", NO_EFFECT)
def test_vllm_keys_without_effect(key: str) -> None:
    [line] = parse_speculative_config(in_json(**{key: 3}))["notes"]
    instead = "; the MTP modules are those of the checkpoint" if key == "model" else ""
    assert line == f"--speculative-config: {key}: no effect{instead}"


@pytest.mark.parametrize("key", REFUSED)
def test_what_would_change_a_result_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match=rf"^--speculative-config: {key} 8 is not supported by"):
        parse_speculative_config(in_json(**{key: 8}))


@pytest.mark.parametrize("name", OTHER_METHODS)
def test_other_methods(name: str) -> None:
    assert refused_json(in_json(method=name)) == (
        f"--speculative-config: method: '{name}' is not supported by mtpbuild; supported: mtp"
    )


@pytest.mark.parametrize("name", ["mpt", 3, ["mtp"]])
def test_unknown_methods(name: object) -> None:
    assert refused_json(in_json(method=name)) == (
        f"--speculative-config: method: unknown method {name!r}, known: mtp, ngram, ngram_gpu, "
        "medusa, mlp_speculator, draft_model, suffix, custom_class, eagle, eagle3, "
        "extract_hidden_states, dflash, dspark"
    )
