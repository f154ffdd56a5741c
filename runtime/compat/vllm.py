"""Lists the keys of vLLM's --speculative-config, and its speculative methods."""

from mtpbuild.runtime.compat import vocabulary
from mtpbuild.runtime.compat.vocabulary import Methods, Vocabulary, no_effect, same

VLLM_METHODS = Methods(
    key="method",
    ours="mtp",
    others="""ngram ngram_gpu medusa mlp_speculator draft_model suffix custom_class eagle eagle3
        extract_hidden_states dflash dspark""",
    models="""deepseek dots3_note mimo mimo_v2 glm4_moe glm4_moe_lite glm_ocr ernie nemotron_h
        exaone_moe exaone4_5 qwen3_next qwen3_5 qwen4_exp longcat_flash bailing_hybrid
        bailing_hybrid_v3 minimax_m3 kimi_k3 pangu_ultra_moe step3p5 hy_v3 hy_v4 gemma4 inkling
        glm5_next""",
)

# vLLM's --speculative-config
VLLM = Vocabulary(
    apart=VLLM_METHODS.key,
    ours={
        "num_speculative_tokens": "nextn",
        "draft_tensor_parallel_size": "tp",  # the modules are split as the main model is
        **same("rejection_sample_method", "draft_sample_method"),
        **same("synthetic_acceptance_rates", "synthetic_acceptance_length"),
    },
    later={
        "num_speculative_tokens_per_batch_size": vocabulary.FIXED,
        "disable_by_batch_size": vocabulary.ALWAYS,
        "speculative_token_tree": vocabulary.CHAIN,
    },
    idle={"draft_tensor_parallel_size": (1, -1)},
    no_effect=no_effect(
        """attention_backend code_revision disable_eagle_block_drop disable_logprobs
        disable_mqa_scorer disable_padded_drafter_batch draft_load_config dspark_draft_topk
        enable_adaptive_verification enforce_eager index_share_for_mtp_iteration kv_cache_dtype
        max_model_len moe_backend parallel_drafting prompt_lookup_max prompt_lookup_min quantization
        revision suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
        suffix_decoding_max_tree_depth suffix_decoding_min_token_prob use_heterogeneous_vocab
        use_local_argmax_reduction""",
        model=vocabulary.MODULES,
    ),
)
