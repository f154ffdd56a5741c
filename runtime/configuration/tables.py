"""The keys of vLLM and TensorRT-LLM, each with mtpbuild's setting or the reason for having none."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Key:
    """The meaning of a key of another system: a setting, a refusal, or no effect."""

    setting: str = ""
    true: str = ""  # the setting's value if the key is a switch and true; false gives no value
    refused: str = ""  # the reason; the key would change results
    idle: tuple[int | str, ...] = ()  # values without effect
    instead: str = ""  # advice, if the key has no effect
    # Of a key without effect: what its object must not ask for; "" is the value if it is no object.
    inside: Mapping[str, "Key"] = field(default_factory=dict)


@dataclass(frozen=True)
class Methods:
    """The names of speculative methods; mtpbuild supports only `ours`."""

    ours: str
    others: list[str]
    models: list[str]  # for each, MODEL_mtp is a deprecated name of `ours`


Table = Mapping[str, "Key | Methods | Table"]


def repeat_entry(names: str, key: Key | None = None) -> Mapping[str, Key]:
    """Return the same entry for several keys; by default each key is a setting of the same name."""
    return {name: key or Key(name) for name in names.split()}


MODULES = Key(instead="the MTP modules are those of the checkpoint")
ALWAYS = Key(refused="every step drafts")
CHAIN = Key(refused="each step verifies one chain of nextn drafts")
FIXED = Key(refused="nextn is fixed when the engine is built")
RANKS = Key(refused="ranks share a model by --tp, --ep and --attention-dp alone", idle=(1, -1))
TOKENS = Key(refused="a step runs no Python: use penalties, --json-schema or structured outputs")
CACHES = Key(refused="caches have the type that the engine was built with", idle=("auto",))
WINDOW = Key(refused="attention has the window of the checkpoint")
SERVED = Key(instead="say it by a flag of mtpbuild serve")
WEIGHTS = Key(refused="the checkpoint runs as it is")

# Names, separated by blanks. Keys in *_IGNORED are accepted and have no effect.
VLLM_METHODS = """ngram ngram_gpu medusa mlp_speculator draft_model suffix custom_class eagle eagle3
    extract_hidden_states dflash dspark"""
MODELS = """bailing_hybrid bailing_hybrid_v3 deepseek dots3_note ernie exaone4_5 exaone_moe gemma4
    glm4_moe glm4_moe_lite glm5_next glm_ocr hy_v3 hy_v4 inkling kimi_k3 longcat_flash mimo mimo_v2
    minimax_m3 nemotron_h pangu_ultra_moe qwen3_5 qwen3_next qwen4_exp step3p5"""
VLLM_IGNORED = """attention_backend code_revision disable_eagle_block_drop disable_logprobs
    disable_mqa_scorer disable_padded_drafter_batch draft_load_config dspark_draft_topk
    enable_adaptive_verification enforce_eager index_share_for_mtp_iteration kv_cache_dtype
    max_model_len moe_backend parallel_drafting prompt_lookup_max prompt_lookup_min quantization
    revision suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
    suffix_decoding_max_tree_depth suffix_decoding_min_token_prob use_heterogeneous_vocab
    use_local_argmax_reduction"""
TRTLLM_METHODS = """AUTO DFlash Draft_Target Eagle Eagle3 Lookahead Medusa NGram PARD SA SaveState
    User_Provided"""
SPECULATIVE_IGNORED = """advanced_sampling_mode allow_advanced_sampling dynamic_tree_max_topK
    enable_penalty load_format max_total_draft_tokens mtp_eagle_one_model"""
TRTLLM_IGNORED = """allreduce_strategy attention_dp_config attn_backend autotuner_enabled backend
    batch_wait_max_tokens_ratio batch_wait_timeout_iters batch_wait_timeout_ms
    cache_transceiver_config checkpoint_format cuda_graph_batch_sizes cuda_graph_config
    cuda_graph_max_batch_size cuda_graph_padding_enabled disable_overlap_scheduler dtype
    enable_autotuner enable_iter_perf_stats enable_iter_req_stats enable_layerwise_nvtx_marker
    enable_lm_head_tp_in_adp enable_min_latency enable_mixed_sampler enable_trtllm_sampler
    fail_fast_on_attention_window_too_large force_dynamic_quantization
    garbage_collection_gen0_threshold gather_generation_logits generation_config gpus_per_node
    iter_perf_stats_interval iter_stats_max_iterations load_format
    max_stats_len mixed_sampler moe_backend moe_config moe_load_balancer moe_max_num_tokens
    num_postprocess_workers nvfp4_gemm_config perf_metrics_max_requests postprocess_tokenizer_dir
    pp_partition print_iter_log pytorch_backend_config ray_worker_extension_cls reasoning_parser
    request_stats_max_iterations return_perf_metrics revision sampler_type scheduler_config
    skip_tokenizer_init stream_interval telemetry_config tokenizer_mode tokenizer_revision
    torch_compile_config trust_remote_code use_cuda_graph"""
VLLM_FILE_IGNORED = """block_size compilation_config disable_log_requests disable_log_stats
    enable_auto_tool_choice enable_prefix_caching enforce_eager gpu_memory_utilization
    max_logprobs quantization seed swap_space task uvicorn_log_level"""

MTP = Methods("MTP", TRTLLM_METHODS.split(), [])
VLLM: Table = {  # vLLM's --speculative-config
    "method": Methods("mtp", VLLM_METHODS.split(), MODELS.split()),
    "num_speculative_tokens": Key("nextn"),
    "draft_tensor_parallel_size": Key("tp", idle=(1, -1)),  # modules are split like the main model
    **repeat_entry("rejection_sample_method draft_sample_method"),
    **repeat_entry("synthetic_acceptance_rates synthetic_acceptance_length"),
    "num_speculative_tokens_per_batch_size": FIXED,
    "disable_by_batch_size": ALWAYS,
    "speculative_token_tree": CHAIN,
    "model": MODULES,
    **repeat_entry(VLLM_IGNORED, Key()),
}
SPECULATIVE: Table = {  # TensorRT-LLM's speculative_config
    "decoding_type": MTP,
    **repeat_entry("max_draft_len num_nextn_predict_layers", Key("nextn")),
    "use_mtp_vanilla": Key("drafter", true="mtp-vanilla"),
    **repeat_entry("use_relaxed_acceptance_for_thinking relaxed_topk relaxed_delta"),
    **repeat_entry("begin_thinking_phase_token end_thinking_phase_token"),
    "use_rejection_sampling": Key("rejection_sample_method", true="standard"),
    **repeat_entry("acceptance_rate_threshold acceptance_rate_window_size max_concurrency", ALWAYS),
    **repeat_entry("sa_config use_dynamic_tree", CHAIN),
    "draft_len_schedule": FIXED,
    **repeat_entry("speculative_model speculative_model_dir", MODULES),
    **repeat_entry(SPECULATIVE_IGNORED, Key()),
}
TRTLLM: Table = {  # the YAML file of TensorRT-LLM, or vLLM's
    "speculative_config": SPECULATIVE,  # or VLLM
    "tensor_parallel_size": Key("tp"),
    "moe_expert_parallel_size": Key("ep", idle=(-1,)),
    "moe_tensor_parallel_size": Key("moe_tp", idle=(-1,)),
    "enable_attention_dp": Key("attention_dp"),
    **repeat_entry("context_parallel_size moe_cluster_parallel_size pipeline_parallel_size", RANKS),
    "batched_logits_processor": TOKENS,
    **repeat_entry("custom_tokenizer enable_lora lora_config model_kwargs quant_config", WEIGHTS),
    "sparse_attention_config": WEIGHTS,
    "max_beam_width": Key(refused="a request has one continuation", idle=(1,)),
    "enable_chunked_prefill": Key(instead="prefill is always chunked, see --prefill-chunk"),
    "guided_decoding_backend": Key(instead="llguidance follows every grammar"),
    **repeat_entry("max_batch_size max_num_seqs", Key(instead="use --max-batch")),
    **repeat_entry("max_input_len max_model_len max_seq_len", Key(instead="use --max-seq-len")),
    **repeat_entry("max_num_batched_tokens max_num_tokens", Key(instead="use --prefill-chunk")),
    "model": Key(instead="use --model"),
    "tokenizer": Key(instead="the checkpoint's is taken"),
    "kv_cache_config": Key(
        inside={
            **repeat_entry("dtype mamba_ssm_cache_dtype", CACHES),
            **repeat_entry("max_attention_window sink_token_length", WINDOW),
        }
    ),
    "kv_cache_dtype": Key(inside={"": CACHES}),
    **repeat_entry("data_parallel_size enable_expert_parallel", RANKS),
    **repeat_entry("api_key chat_template host port served_model_name tool_call_parser", SERVED),
    **repeat_entry(f"{TRTLLM_IGNORED} {VLLM_FILE_IGNORED}", Key()),
}
