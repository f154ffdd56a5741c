"""TensorRT-LLM's YAML file: what is taken, what is refused and with which words."""

from pathlib import Path

import pytest

from mtpbuild.runtime.configuration.read import parse_llm_yaml
from mtpbuild.runtime.configuration.settings import Configuration
from mtpbuild.runtime.errors import MissingDependencyError, UsageError, advise_install
from tests.support.stand_ins import importing

# The vocabulary is written out: a name that vanishes from the code has to fail here.
OTHER_METHODS = [
    "AUTO", "DFlash", "Draft_Target", "Eagle", "Eagle3", "Lookahead", "Medusa", "NGram", "PARD",
    "SA", "SaveState", "User_Provided",
]  # fmt: skip
NO_EFFECT = [
    "allreduce_strategy", "attention_dp_config", "attn_backend", "autotuner_enabled", "backend",
    "batch_wait_max_tokens_ratio", "batch_wait_timeout_iters", "batch_wait_timeout_ms",
    "cache_transceiver_config", "checkpoint_format", "cuda_graph_batch_sizes", "cuda_graph_config",
    "cuda_graph_max_batch_size", "cuda_graph_padding_enabled", "disable_overlap_scheduler", "dtype",
    "enable_autotuner", "enable_chunked_prefill", "enable_iter_perf_stats",
    "enable_iter_req_stats", "enable_layerwise_nvtx_marker", "enable_lm_head_tp_in_adp",
    "enable_min_latency", "enable_mixed_sampler", "enable_trtllm_sampler",
    "fail_fast_on_attention_window_too_large", "force_dynamic_quantization",
    "garbage_collection_gen0_threshold", "gather_generation_logits", "generation_config",
    "gpus_per_node", "guided_decoding_backend", "iter_perf_stats_interval",
    "iter_stats_max_iterations", "kv_cache_config",
    "kv_cache_dtype", "load_format", "max_batch_size", "max_input_len", "max_num_tokens",
    "max_seq_len", "max_stats_len", "mixed_sampler", "model", "moe_backend", "moe_config",
    "moe_load_balancer", "moe_max_num_tokens", "num_postprocess_workers", "nvfp4_gemm_config",
    "perf_metrics_max_requests", "postprocess_tokenizer_dir", "pp_partition", "print_iter_log",
    "pytorch_backend_config", "ray_worker_extension_cls", "reasoning_parser",
    "request_stats_max_iterations", "return_perf_metrics", "revision", "sampler_type",
    "scheduler_config", "skip_tokenizer_init", "stream_interval", "telemetry_config", "tokenizer",
    "tokenizer_mode", "tokenizer_revision", "torch_compile_config", "trust_remote_code",
    "use_cuda_graph",
]  # fmt: skip
NO_EFFECT_SPECULATIVE = [
    "advanced_sampling_mode", "allow_advanced_sampling", "dynamic_tree_max_topK", "enable_penalty",
    "load_format", "max_total_draft_tokens", "mtp_eagle_one_model", "speculative_model",
    "speculative_model_dir",
]  # fmt: skip
REFUSED = [
    "batched_logits_processor", "context_parallel_size", "custom_tokenizer", "enable_lora",
    "lora_config", "max_beam_width", "model_kwargs",
    "moe_cluster_parallel_size", "pipeline_parallel_size", "quant_config",
    "sparse_attention_config",
]  # fmt: skip
REFUSED_SPECULATIVE = [
    "acceptance_rate_threshold", "acceptance_rate_window_size", "draft_len_schedule",
    "max_concurrency", "sa_config", "use_dynamic_tree",
]  # fmt: skip
MTP = "speculative_config: {decoding_type: MTP, "


def parse_yaml(folder: Path, text: str) -> Configuration:
    """Write the text into `x.yaml`, the name that messages have to say, and read it."""
    (folder / "x.yaml").write_text(text, encoding="utf-8")
    return parse_llm_yaml(folder / "x.yaml")


def refused_yaml(folder: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_yaml(folder, text)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (MTP + "max_draft_len: 3}", {"nextn": 3}),
        (MTP + "num_nextn_predict_layers: 1}", {"nextn": 1}),
        (MTP + "num_nextn_predict_layers: 2, max_draft_len: 2}", {"nextn": 2}),
        ("speculative_config: {decoding_type: mtp}", {}),
        ("speculative_config: null", {}),
        (MTP + "use_mtp_vanilla: true}", {"drafter": "mtp-vanilla"}),
        (MTP + "use_mtp_vanilla: False}", {}),
        (MTP + "use_rejection_sampling: true}", {"rejection_sample_method": "standard"}),
        (MTP + "use_relaxed_acceptance_for_thinking: true, relaxed_topk: 10, relaxed_delta: .6}",
         {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 10, "relaxed_delta": 0.6}),
        (MTP + "begin_thinking_phase_token: 5, end_thinking_phase_token: 6}",
         {"begin_thinking_phase_token": 5, "end_thinking_phase_token": 6}),
        (MTP + "use_dynamic_tree: false, draft_len_schedule: null, relaxed_topk:}", {}),
        ("moe_tensor_parallel_size: -1\nmoe_expert_parallel_size: -1\n", {}),
        ("pipeline_parallel_size: 1\ncontext_parallel_size: -1\n", {}),
        ("tensor_parallel_size: 8\nmoe_expert_parallel_size: 4\nmoe_tensor_parallel_size: 2\n"
         "enable_attention_dp: true\n", {"tp": 8, "ep": 4, "moe_tp": 2, "attention_dp": True}),
        ("max_beam_width: 1\nlora_config: {}\nenable_lora: false\n", {}),
        ("speculative-config: {method: mtp, num-speculative-tokens: 3}\n"
         "tensor-parallel-size: 8\ndata-parallel-size: 1\n", {"nextn": 3, "tp": 8}),
        ("speculative_config: {num_speculative_tokens: 2}", {"nextn": 2}),
    ],
)  # fmt: skip
def test_tensorrt_llm(text: str, settings: Configuration, tmp_path: Path) -> None:
    assert parse_yaml(tmp_path, text) == settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be an object of keys and values, not None"),
        ("MTP", "must be an object of keys and values, not 'MTP'"),
        ("1: 2", "a key must be text, not 1"),
        ("a: [1\nb: 2", "not YAML at line 2, column 2 (expected ',' or ']', but got ':')"),
        ("a: !!python/name:os.system x",
         "not YAML at line 1, column 4 (could not determine a constructor for the tag "
         "'tag:yaml.org,2002:python/name:os.system')"),
        ("a: !!bool x", "can't be read ('x')"),
        ("a: 2024-13-45", "can't be read (month must be in 1..12)"),
        pytest.param("a: [" * 3000, "not YAML (nested too deep)", id="nested"),
        ("a: \x00", "not YAML (special characters are not allowed)"),
        ("use_cuda_graph: true\nuse_cuda_graph: false", "given twice, again in line 2"),
        (MTP + "relaxed_topk: 1, relaxed_topk: 2}", "'relaxed_topk' is given twice, again in "),
        ("kv_cache_confg: {}", "unknown key 'kv_cache_confg'; did you mean 'kv_cache_config'?"),
        ("speculative-confg: {}",
         "unknown key 'speculative-confg'; did you mean 'speculative_config'?"),
        ("kv_cache_config: {enable_block_reuse: true, dtype: fp8}",
         "kv_cache_config: dtype fp8 is not supported by this version; caches have the type that "
         "the engine was built with: leave it out"),
        ("kv-cache-config: {mamba-ssm-cache-dtype: float16}", ": mamba-ssm-cache-dtype float16 is"),
        ("kv_cache_config: {max_attention_window: [4096]}", "max_attention_window [4096] is not"),
        ("kv_cache_config: {sink_token_length: 4}", "sink_token_length 4 is not supported by"),
        ("kv-cache-dtype: fp8_e4m3", "kv-cache-dtype fp8_e4m3 is not supported by this version"),
        ("data-parallel-size: 2", "data-parallel-size 2 is not supported by this version"),
        ("speculative-config: {method: ngram, num_speculative_tokens: 2}",
         "speculative-config: method: 'ngram' is not supported by mtpbuild; supported: mtp"),
        ("zzz: {}",
         "unknown key 'zzz'; known: speculative_config, tensor_parallel_size, "
         "moe_expert_parallel_size, moe_tensor_parallel_size, enable_attention_dp"),
        ("tensor_parallel_size: 0", "tensor_parallel_size must be a whole number in 1..64, not 0"),
        ("enable_attention_dp: 1", "enable_attention_dp must be true or false, not 1"),
        ("pipeline_parallel_size: 2",
         "pipeline_parallel_size 2 is not supported by this version; ranks share a model by "
         "--tp, --ep and --attention-dp alone: leave it out"),
        ("decoding_type: MTP", "unknown key 'decoding_type'; it belongs under speculative_config"),
        ("speculative_config: MTP", ": speculative_config: must be an object of keys and values"),
        ("speculative_config: {max_draft_len: 3}",
         ": speculative_config: decoding_type is missing; supported: MTP"),
        ("speculative_config: {decoding_type: MTP, decode_type: MTP}",
         "speculative_config: unknown key 'decode_type'; did you mean 'decoding_type'?"),
        (MTP + "max_draft_len: 16}",
         "speculative_config: max_draft_len must be a whole number in 0..15, not 16"),
        (MTP + "max_draft_len: 3, num_nextn_predict_layers: 2}",
         "nextn: --config x.yaml: speculative_config: max_draft_len says 3, --config x.yaml: "
         "speculative_config: num_nextn_predict_layers says 2; drop one"),
        (MTP + "num_speculative_tokens: 3}",
         "unknown key 'num_speculative_tokens'; did you mean 'max_draft_len'?"),
        (MTP + "drafter: x}", "unknown key 'drafter'; did you mean 'use_mtp_vanilla'?"),
        (MTP + "relaxed_top: 3}", "unknown key 'relaxed_top'; did you mean 'relaxed_topk'?"),
        (MTP + "relaxed_topk: 2.5}", "relaxed_topk must be a whole number from 1, not 2.5"),
        (MTP + "relaxed_delta: .inf}", "relaxed_delta must be a number in 0..1, not inf"),
        (MTP + "use_mtp_vanilla: 1}", "use_mtp_vanilla must be true or false, not 1"),
        (MTP + "end_thinking_phase_token: -1}",
         "end_thinking_phase_token must be a whole number from 0, not -1"),
    ],
)  # fmt: skip
def test_tensorrt_llm_refused(text: str, says: str, tmp_path: Path) -> None:
    line = refused_yaml(tmp_path, text)
    assert line.startswith(("--config x.yaml: ", "nextn: "))
    assert says in line


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *((key, f"{key}: {{any: [1]}}") for key in NO_EFFECT),
        *((f"speculative_config: {key}", f"{MTP}{key}: 3}}") for key in NO_EFFECT_SPECULATIVE),
    ],
)
def test_keys_without_effect(key: str, text: str, tmp_path: Path) -> None:
    """One line each; some say what to do instead."""
    [line] = parse_yaml(tmp_path, text)["notes"]
    assert line.split("; ")[0] == f"--config {tmp_path}/x.yaml: {key}: no effect"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("guided_decoding_backend: xgrammar",
         "guided_decoding_backend: no effect; llguidance follows every grammar"),
        ("enable_chunked_prefill: true",
         "enable_chunked_prefill: no effect; prefill is always chunked, see --prefill-chunk"),
        ("kv_cache_config: {dtype: auto, sink_token_length: 0, max_attention_window: null}",
         "kv_cache_config: no effect"),
        ("kv-cache-dtype: auto", "kv-cache-dtype: no effect"),
        ("max-model-len: 8192", "max-model-len: no effect; use --max-seq-len"),
        ("served-model-name: r1",
         "served-model-name: no effect; say it by a flag of mtpbuild serve"),
        ("max_batch_size: 8", "max_batch_size: no effect; use --max-batch"),
        ("max_input_len: 8", "max_input_len: no effect; use --max-seq-len"),
        ("max_num_tokens: 8", "max_num_tokens: no effect; use --prefill-chunk"),
        ("max_seq_len: 100", "max_seq_len: no effect; use --max-seq-len"),
        ("model: x", "model: no effect; use --model"),
        ("tokenizer: x", "tokenizer: no effect; the checkpoint's is taken"),
        (MTP + "speculative_model: x}",
         "speculative_config: speculative_model: no effect; the MTP modules are those of the "
         "checkpoint"),
    ],
)  # fmt: skip
def test_a_line_may_say_what_to_do(text: str, says: str, tmp_path: Path) -> None:
    assert parse_yaml(tmp_path, text)["notes"] == (f"--config {tmp_path}/x.yaml: {says}",)


@pytest.mark.parametrize(
    "text",
    [*(f"{key}: 8" for key in REFUSED), *(f"{MTP}{key}: 8}}" for key in REFUSED_SPECULATIVE)],
)
def test_what_would_change_a_result_is_refused(text: str, tmp_path: Path) -> None:
    key = text.removeprefix(MTP).partition(":")[0]
    with pytest.raises(UsageError, match=rf": {key} 8 is not supported by this version; .*: leave"):
        parse_yaml(tmp_path, text)


@pytest.mark.parametrize("name", ["no.yaml", "folder", "latin.yaml"])
def test_files_that_can_not_be_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    with pytest.raises(UsageError, match=f"^--config {tmp_path / name}: can't be read "):
        parse_llm_yaml(tmp_path / name)


def test_yaml_is_an_extra(tmp_path: Path) -> None:
    with importing({"yaml": None}), pytest.raises(MissingDependencyError) as caught:
        parse_yaml(tmp_path, "")
    assert str(caught.value) == f"--config {tmp_path}/x.yaml needs yaml: {advise_install('yaml')}"


@pytest.mark.parametrize("name", OTHER_METHODS)
def test_other_methods(name: str, tmp_path: Path) -> None:
    line = refused_yaml(tmp_path, f"speculative_config: {{decoding_type: {name}}}")
    assert line == (
        f"--config x.yaml: speculative_config: decoding_type: '{name}' is not supported by "
        "mtpbuild; supported: MTP"
    )
