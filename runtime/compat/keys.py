"""The configuration keys of vLLM and TensorRT-LLM: which are ours, which mean nothing here."""

import itertools
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

NEXTN_LIMIT = 15

Reader = Callable[[object], object]  # checks a value; ValueError says what it must be


@dataclass(frozen=True)
class Vocabulary:
    """The keys of one configuration object of another system."""

    ours: Mapping[str, tuple[str, Reader]]  # key -> field of Settings, reader of its value
    no_effect: Mapping[str, str]  # key -> what to do instead, if anything
    later: Mapping[str, "Later"]  # what would change a result and is not there yet


@dataclass(frozen=True)
class Later:
    """A key that this version refuses unless its value asks for nothing."""

    instead: str
    idle: tuple[int, ...] = ()  # besides null, false, 0 and empty

    def refusal(self, key: str, value: object) -> list[str]:
        """The line that refuses it, if there is something to refuse."""
        if not value or (type(value) is int and value in self.idle):
            return []
        refused = f"{key} {show(value)} is not supported by this version"
        return [f"{refused}; {self.instead}: leave it out"]


@dataclass(frozen=True)
class Methods:
    """The names of a system's speculative methods, of which mtpbuild has one."""

    key: str
    ours: str
    others: tuple[str, ...]
    aliases: tuple[str, ...] = ()  # older names of ours


def show(value: object) -> str:
    """A value as its user wrote it, cut to a line."""
    return (value if isinstance(value, str) else json.dumps(value, default=repr))[:60]


# Readers of values. None, wherever it is given, leaves a setting unset and is never read.


def whole_number(least: int, most: int | None = None) -> Reader:
    span = f"of {least}..{most}" if most is not None else f"from {least}"

    def read(value: object) -> int:
        if type(value) is not int:
            raise ValueError(f"must be a whole number {span}, not {reprlib.repr(value)}")
        if value < least or (most is not None and value > most):
            outside = f"is outside {least}..{most}" if most is not None else f"is below {least}"
            raise ValueError(f"{value} {outside}")
        return value

    return read


def number(least: float, most: float = math.inf) -> Reader:
    span = f"from {least:g}" if most == math.inf else f"of {least:g}..{most:g}"

    def read(value: object) -> float:
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not least <= value <= most or value == math.inf:  # type: ignore[operator]
            raise ValueError(f"must be a number {span}, not {reprlib.repr(value)}")
        return float(value)  # type: ignore[arg-type]

    return read


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {reprlib.repr(value)}")
    return value


def choice(*names: str) -> Reader:
    def read(value: object) -> str:
        if value not in names:
            raise ValueError(f"{reprlib.repr(value)} is unknown; known: {', '.join(names)}")
        return str(value)

    return read


def flag_for(name: str) -> Reader:
    """True is the name, false leaves the choice to us."""
    return lambda value: name if flag(value) else None


def rates(value: object) -> tuple[float, ...]:
    """Unconditional: entry i is the rate of steps whose first i + 1 drafts are all accepted."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a list of rates, not {reprlib.repr(value)}")
    read = number(0, 1)
    found = tuple(float(read(rate)) for rate in value)  # type: ignore[arg-type]
    if any(later > earlier for earlier, later in itertools.pairwise(found)):
        raise ValueError(f"must not increase, as in {reprlib.repr(value)}")
    return found


_NEXTN = ("nextn", whole_number(0, NEXTN_LIMIT))
_MODULES = "the MTP modules are those of the checkpoint"
_CHAIN = Later("each step verifies one chain of nextn drafts")
_FIXED = Later("nextn is fixed when the engine is built")
_DEVICES = Later("an engine runs on one device", idle=(1, -1))
_ALWAYS = Later("every step drafts")
_WEIGHTS = Later("the checkpoint runs as it is")
_TOKENS = Later("sampling has no such hook")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _table(**keys: Later) -> Mapping[str, Later]:
    return MappingProxyType(keys)


def _no_effect(names: str, **hints: str) -> Mapping[str, str]:
    return MappingProxyType({**dict.fromkeys(_words(names), ""), **hints})


VLLM_METHODS = Methods(
    key="method",
    ours="mtp",
    others=_words(
        """ngram ngram_gpu medusa mlp_speculator draft_model suffix custom_class eagle eagle3
        extract_hidden_states dflash dspark"""
    ),
    aliases=tuple(
        f"{model}_mtp"
        for model in _words(
            """deepseek dots3_note mimo mimo_v2 glm4_moe glm4_moe_lite glm_ocr ernie
        nemotron_h exaone_moe exaone4_5 qwen3_next qwen3_5 qwen4_exp longcat_flash bailing_hybrid
        bailing_hybrid_v3 minimax_m3 kimi_k3 pangu_ultra_moe step3p5 hy_v3 hy_v4 gemma4 inkling
        glm5_next"""
        )
    ),
)

# vLLM's --speculative-config, without `method`
VLLM = Vocabulary(
    ours=MappingProxyType(
        {
            "num_speculative_tokens": _NEXTN,
            "rejection_sample_method": (
                "rejection_sample_method",
                choice("standard", "synthetic", "block"),
            ),
            "draft_sample_method": ("draft_sample_method", choice("greedy", "probabilistic")),
            "synthetic_acceptance_rates": ("synthetic_acceptance_rates", rates),
            "synthetic_acceptance_length": (
                "synthetic_acceptance_length",
                number(1, NEXTN_LIMIT + 1),
            ),
        }
    ),
    later=_table(
        num_speculative_tokens_per_batch_size=_FIXED,
        disable_by_batch_size=_ALWAYS,
        draft_tensor_parallel_size=_DEVICES,
        speculative_token_tree=_CHAIN,
    ),
    no_effect=_no_effect(
        """attention_backend code_revision disable_eagle_block_drop disable_logprobs
        disable_mqa_scorer disable_padded_drafter_batch draft_load_config dspark_draft_topk
        enable_adaptive_verification enforce_eager index_share_for_mtp_iteration kv_cache_dtype
        max_model_len moe_backend parallel_drafting prompt_lookup_max prompt_lookup_min quantization
        revision suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
        suffix_decoding_max_tree_depth suffix_decoding_min_token_prob use_heterogeneous_vocab
        use_local_argmax_reduction""",
        model=_MODULES,
    ),
)

TRTLLM_METHODS = Methods(
    key="decoding_type",
    ours="MTP",
    others=_words(
        """AUTO DFlash Draft_Target Eagle Eagle3 Lookahead Medusa NGram PARD SA SaveState
        User_Provided"""
    ),
)

# TensorRT-LLM's speculative_config, without `decoding_type`
TRTLLM_SPECULATIVE = Vocabulary(
    ours=MappingProxyType(
        {
            "max_draft_len": _NEXTN,
            "num_nextn_predict_layers": _NEXTN,
            "use_mtp_vanilla": ("drafter", flag_for("mtp-vanilla")),
            "use_relaxed_acceptance_for_thinking": ("use_relaxed_acceptance_for_thinking", flag),
            "relaxed_topk": ("relaxed_topk", whole_number(1)),
            "relaxed_delta": ("relaxed_delta", number(0, 1)),
            "begin_thinking_phase_token": ("begin_thinking_phase_token", whole_number(0)),
            "end_thinking_phase_token": ("end_thinking_phase_token", whole_number(0)),
            "use_rejection_sampling": ("rejection_sample_method", flag_for("standard")),
        }
    ),
    later=_table(
        acceptance_rate_threshold=_ALWAYS,
        acceptance_rate_window_size=_ALWAYS,
        draft_len_schedule=_FIXED,
        max_concurrency=_ALWAYS,
        sa_config=_CHAIN,
        use_dynamic_tree=_CHAIN,
    ),
    no_effect=_no_effect(
        """advanced_sampling_mode allow_advanced_sampling dynamic_tree_max_topK enable_penalty
        load_format max_total_draft_tokens mtp_eagle_one_model""",
        speculative_model=_MODULES,
        speculative_model_dir=_MODULES,
    ),
)

# The YAML file around it
TRTLLM = Vocabulary(
    ours=MappingProxyType({}),
    later=_table(
        batched_logits_processor=_TOKENS,
        context_parallel_size=_DEVICES,
        custom_tokenizer=_WEIGHTS,
        enable_lora=_WEIGHTS,
        guided_decoding_backend=_TOKENS,
        lora_config=_WEIGHTS,
        max_beam_width=Later("a request has one continuation", idle=(1,)),
        model_kwargs=_WEIGHTS,
        moe_cluster_parallel_size=_DEVICES,
        moe_expert_parallel_size=_DEVICES,
        moe_tensor_parallel_size=_DEVICES,
        pipeline_parallel_size=_DEVICES,
        quant_config=_WEIGHTS,
        sparse_attention_config=_WEIGHTS,
        tensor_parallel_size=_DEVICES,
    ),
    no_effect=_no_effect(
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
        enable_attention_dp="use --attention-dp",
        enable_chunked_prefill="prefill is always chunked, see --prefill-chunk",
        max_batch_size="use --max-batch",
        max_input_len="use --max-seq-len",
        max_num_tokens="use --prefill-chunk",
        max_seq_len="use --max-seq-len",
        model="use --model",
        tokenizer="the checkpoint's is taken",
    ),
)
