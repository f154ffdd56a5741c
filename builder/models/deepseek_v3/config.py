"""A checkpoint's `config.json`, normalised once into the few values that shape the graph."""

import json
import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpbuild.runtime.errors import CheckpointError

ARCHITECTURES = ("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN")
SIZE_LIMIT, COUNT_LIMIT = 1 << 24, 1 << 12  # of a dimension; of layers, modules, experts


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `default`, `linear` or `yarn` (spec/deepseek-v3.md section 2.1)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a DeepSeek-V3-class model; fields carry the checkpoint's own names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    first_k_dense_replace: int
    moe_layer_freq: int
    num_nextn_predict_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_interleave: bool
    tie_word_embeddings: bool
    rope: RopeConfig

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dim(self) -> int:
        """Values per cached token and layer: the latent and the rotary key (C in DESIGN 3)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe(self, layer: int) -> bool:
        """Layers from `num_hidden_layers` on are MTP modules, always MoE."""
        if layer >= self.num_hidden_layers:
            return self.n_routed_experts > 0
        return (
            self.n_routed_experts > 0
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )


def load_config(folder: Path) -> ModelConfig:
    """Read `folder/config.json`; raises CheckpointError with what is wrong and where."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no config.json; give a Hugging Face checkpoint folder"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    try:
        return parse_config(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Normalise a DeepSeek-V3 `config.json` in the old or the new Hugging Face spelling."""
    _check_supported(raw)
    read = _Reader(raw)
    experts = read.integer("n_routed_experts", 0, default=0, most=COUNT_LIMIT)
    config = ModelConfig(
        vocab_size=read.integer("vocab_size", 1),
        hidden_size=read.integer("hidden_size", 1),
        intermediate_size=read.integer("intermediate_size", 1),
        moe_intermediate_size=read.integer("moe_intermediate_size", 1, default=1),
        num_hidden_layers=read.integer("num_hidden_layers", 1, most=COUNT_LIMIT),
        num_attention_heads=read.integer("num_attention_heads", 1),
        q_lora_rank=read.integer("q_lora_rank", 1) if raw.get("q_lora_rank") is not None else None,
        kv_lora_rank=read.integer("kv_lora_rank", 1),
        qk_nope_head_dim=read.integer("qk_nope_head_dim", 1),
        qk_rope_head_dim=read.integer("qk_rope_head_dim", 2),
        v_head_dim=read.integer("v_head_dim", 1),
        n_routed_experts=experts,
        n_shared_experts=read.integer("n_shared_experts", 0, default=0),
        num_experts_per_tok=read.integer("num_experts_per_tok", 1, default=1),
        n_group=read.integer("n_group", 1, default=1),
        topk_group=read.integer("topk_group", 1, default=1),
        routed_scaling_factor=read.number("routed_scaling_factor", 1.0),
        norm_topk_prob=read.flag("norm_topk_prob", True),
        first_k_dense_replace=read.integer("first_k_dense_replace", 0, default=0),
        moe_layer_freq=read.integer("moe_layer_freq", 1, default=1),
        num_nextn_predict_layers=read.integer(
            "num_nextn_predict_layers", 0, default=0, most=COUNT_LIMIT
        ),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6, above=0),
        max_position_embeddings=read.integer("max_position_embeddings", 1),
        rope_interleave=read.flag("rope_interleave", True),
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        rope=_parse_rope(raw),
    )
    _check_shape(config)
    return config


def _check_supported(raw: Mapping[str, Any]) -> None:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"architectures must be a list of names, not {reprlib.repr(names)}")
    if raw.get("model_type") != "deepseek_v3" and not set(names) & set(ARCHITECTURES):
        found = ", ".join(names) or raw.get("model_type") or "none"
        raise CheckpointError(
            f"unsupported architecture {found}; "
            f"supported: {ARCHITECTURES[0]} (model_type deepseek_v3)"
        )
    for key, supported in (
        ("hidden_act", "silu"),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
    ):
        if raw.get(key, supported) != supported:
            raise CheckpointError(f"{key} {raw[key]!r} is not supported; supported: {supported!r}")
    if raw.get("attention_bias"):
        raise CheckpointError("attention_bias true is not supported; DeepSeek-V3 has no biases")


def _check_shape(config: ModelConfig) -> None:
    if config.qk_rope_head_dim % 2:
        raise CheckpointError(f"qk_rope_head_dim {config.qk_rope_head_dim} must be even")
    if not config.n_routed_experts:
        return
    size, rest = divmod(config.n_routed_experts, config.n_group)
    if rest or size < 2:
        raise CheckpointError(
            f"n_routed_experts {config.n_routed_experts} must split into n_group {config.n_group} "
            "groups of at least 2"
        )
    if config.topk_group > config.n_group:
        raise CheckpointError(f"topk_group {config.topk_group} exceeds n_group {config.n_group}")
    if config.num_experts_per_tok > config.topk_group * size:
        raise CheckpointError(
            f"num_experts_per_tok {config.num_experts_per_tok} exceeds the "
            f"{config.topk_group * size} experts of topk_group {config.topk_group} groups"
        )


def _parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    # New spelling: all in rope_parameters. Old: rope_theta at the top, the rest in rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError("rope_parameters (rope_scaling) must be an object or null")
    read = _Reader(rope)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in ("default", "linear", "yarn"):
        raise CheckpointError(
            f"rope type {kind!r} is not supported; supported: default, linear, yarn"
        )
    theta = rope if rope.get("rope_theta") is not None else raw
    limit = _Reader(raw).integer("max_position_embeddings", 1)
    original = read.integer("original_max_position_embeddings", 1, default=limit)
    factor = read.number("factor", limit / original if kind == "yarn" else 1.0, above=0)
    given = rope.get("attention_factor") is not None
    return RopeConfig(
        theta=_Reader(theta).number("rope_theta", 10000.0, above=1),
        kind=kind,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=read.number("beta_fast", 32.0, above=0),
        beta_slow=read.number("beta_slow", 1.0, above=0),
        mscale=read.number("mscale", 0.0, above=0),
        mscale_all_dim=read.number("mscale_all_dim", 0.0, above=0),
        attention_factor=read.number("attention_factor", 1.0, above=0) if given else None,
        truncate=read.flag("truncate", True),
    )


@dataclass(frozen=True)
class _Reader:
    """Typed look-ups that name the key when a value is missing or of the wrong kind."""

    raw: Mapping[str, Any]

    def integer(
        self, key: str, least: int, default: int | None = None, most: int = SIZE_LIMIT
    ) -> int:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise CheckpointError(
                f"{key} must be an integer of {least}..{most}, not {reprlib.repr(value)}"
            )
        return value

    def number(self, key: str, default: float, above: float = -math.inf) -> float:
        """A finite number above the bound, or the default itself."""
        value = self.raw.get(key)
        if value is None:
            return default
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not (value == default or above < value <= sys.float_info.max):
            bound = "" if above == -math.inf else f" above {above:g}"
            raise CheckpointError(f"{key} must be a number{bound}, not {reprlib.repr(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{key} must be true or false, not {reprlib.repr(value)}")
        return value
