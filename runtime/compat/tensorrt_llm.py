"""Lists the keys of TensorRT-LLM's YAML file, and its speculative methods."""

from mtpbuild.runtime.compat import vocabulary
from mtpbuild.runtime.compat.vocabulary import Later, Methods, Vocabulary, no_effect, same

WEIGHTS = Later("the checkpoint runs as it is")
TOKENS = Later("a step runs no Python: use penalties, --json-schema or structured outputs")
SPLITS = ("context", "pipeline", "moe_cluster")

TRTLLM_METHODS = Methods(
    key="decoding_type",
    ours="MTP",
    others="""AUTO DFlash Draft_Target Eagle Eagle3 Lookahead Medusa NGram PARD SA SaveState
        User_Provided""",
)

# TensorRT-LLM's speculative_config
TRTLLM_SPECULATIVE = Vocabulary(
    apart=TRTLLM_METHODS.key,
    ours={
        "max_draft_len": "nextn",
        "num_nextn_predict_layers": "nextn",
        "use_mtp_vanilla": "drafter",
        **same("use_relaxed_acceptance_for_thinking", "relaxed_topk", "relaxed_delta"),
        **same("begin_thinking_phase_token", "end_thinking_phase_token"),
        "use_rejection_sampling": "rejection_sample_method",
    },
    switches={"use_mtp_vanilla": "mtp-vanilla", "use_rejection_sampling": "standard"},
    later={
        "acceptance_rate_threshold": vocabulary.ALWAYS,
        "acceptance_rate_window_size": vocabulary.ALWAYS,
        "max_concurrency": vocabulary.ALWAYS,
        **dict.fromkeys(("sa_config", "use_dynamic_tree"), vocabulary.CHAIN),
        "draft_len_schedule": vocabulary.FIXED,
    },
    no_effect=no_effect(
        """advanced_sampling_mode allow_advanced_sampling dynamic_tree_max_topK enable_penalty
        load_format max_total_draft_tokens mtp_eagle_one_model""",
        speculative_model=vocabulary.MODULES,
        speculative_model_dir=vocabulary.MODULES,
    ),
)

# The YAML file around it
TRTLLM = Vocabulary(
    apart="speculative_config",
    ours={
        "tensor_parallel_size": "tp",
        "moe_expert_parallel_size": "ep",
        "moe_tensor_parallel_size": "moe_tp",
        "enable_attention_dp": "attention_dp",
    },
    idle={"moe_expert_parallel_size": (-1,), "moe_tensor_parallel_size": (-1,)},
    later={
        **{f"{split}_parallel_size": vocabulary.RANKS for split in SPLITS},
        "batched_logits_processor": TOKENS,
        **dict.fromkeys(("custom_tokenizer", "enable_lora", "lora_config"), WEIGHTS),
        **dict.fromkeys(("model_kwargs", "quant_config", "sparse_attention_config"), WEIGHTS),
        "max_beam_width": Later("a request has one continuation", idle=(1,)),
    },
    no_effect=no_effect(
        """allreduce_strategy attention_dp_config attn_backend autotuner_enabled backend
        batch_wait_max_tokens_ratio batch_wait_timeout_iters batch_wait_timeout_ms
        cache_transceiver_config checkpoint_format cuda_graph_batch_sizes cuda_graph_config
        cuda_graph_max_batch_size cuda_graph_padding_enabled disable_overlap_scheduler dtype
        enable_autotuner enable_iter_perf_stats enable_iter_req_stats
        enable_layerwise_nvtx_marker enable_lm_head_tp_in_adp enable_min_latency
        enable_mixed_sampler enable_trtllm_sampler fail_fast_on_attention_window_too_large
        force_dynamic_quantization garbage_collection_gen0_threshold gather_generation_logits
        generation_config gpus_per_node iter_perf_stats_interval iter_stats_max_iterations
        kv_cache_config kv_cache_dtype load_format max_stats_len mixed_sampler moe_backend
        moe_config moe_load_balancer moe_max_num_tokens nvfp4_gemm_config num_postprocess_workers
        perf_metrics_max_requests postprocess_tokenizer_dir pp_partition print_iter_log
        pytorch_backend_config ray_worker_extension_cls reasoning_parser
        request_stats_max_iterations return_perf_metrics revision sampler_type scheduler_config
        skip_tokenizer_init stream_interval telemetry_config tokenizer_mode tokenizer_revision
        torch_compile_config trust_remote_code use_cuda_graph""",
        enable_chunked_prefill="prefill is always chunked, see --prefill-chunk",
        guided_decoding_backend="llguidance follows every grammar",
        max_batch_size="use --max-batch",
        max_input_len="use --max-seq-len",
        max_num_tokens="use --prefill-chunk",
        max_seq_len="use --max-seq-len",
        model="use --model",
        tokenizer="the checkpoint's is taken",
    ),
)
