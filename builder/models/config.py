"""A checkpoint's `config.json`, normalised once into the few values that shape the graph.

Here is what models of several families have; a family adds its own in a subclass.
"""

import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from mtpbuild.runtime.errors import CheckpointError, UsageError

SIZE_LIMIT, COUNT_LIMIT = 1 << 24, 1 << 12  # of a dimension; of layers, modules, experts


NUMBERS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}  # of YaRN


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the compiler reads of any model; fields carry the checkpoints' own names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    n_routed_experts: int = 0

    def sliced(self, first: int, count: int) -> Self:
        """The configuration of `count` main layers from `first` on; raises UsageError."""
        return replace(self, num_hidden_layers=count)


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ModelConfig):
    """What models with routed experts have, behind some dense layers."""

    intermediate_size: int
    moe_intermediate_size: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    first_k_dense_replace: int
    moe_layer_freq: int

    def is_moe(self, layer: int) -> bool:
        """Layers from `num_hidden_layers` on are MTP modules, always MoE."""
        if layer >= self.num_hidden_layers:
            return self.n_routed_experts > 0
        return (
            self.n_routed_experts > 0
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    def sliced(self, first: int, count: int) -> Self:
        if first % self.moe_layer_freq:
            raise UsageError(
                f"--layers {first}-{first + count - 1}: with moe_layer_freq {self.moe_layer_freq} "
                "the first layer must be a multiple of it"
            )
        dense = max(0, self.first_k_dense_replace - first)
        return replace(super().sliced(first, count), first_k_dense_replace=dense)


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
class Reader:
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

    def only(self, **supported: str) -> None:
        """Refuse a key that is there with another value than the one supported."""
        for key, value in supported.items():
            if self.raw.get(key, value) != value:
                found = f"{key} {self.raw[key]!r}"
                raise CheckpointError(f"{found} is not supported; supported: {value!r}")

    def model(self) -> dict[str, Any]:
        """The fields of `ModelConfig`, but for routed experts."""
        sizes = ("vocab_size", "hidden_size", "max_position_embeddings")
        modules = "num_nextn_predict_layers"
        return {key: self.integer(key, 1) for key in sizes} | {
            "num_hidden_layers": self.integer("num_hidden_layers", 1, most=COUNT_LIMIT),
            modules: self.integer(modules, 0, default=0, most=COUNT_LIMIT),
            "rms_norm_eps": self.number("rms_norm_eps", 1e-6, above=0),
            "tie_word_embeddings": self.flag("tie_word_embeddings", False),
        }

    def moe(self) -> dict[str, Any]:
        """The fields that `MoEConfig` adds, whose groups of experts fit together."""
        found = {
            "n_routed_experts": self.integer("n_routed_experts", 0, default=0, most=COUNT_LIMIT),
            "intermediate_size": self.integer("intermediate_size", 1),
            "routed_scaling_factor": self.number("routed_scaling_factor", 1.0),
            "norm_topk_prob": self.flag("norm_topk_prob", True),
        }
        for key in ("n_shared_experts", "first_k_dense_replace"):
            found[key] = self.integer(key, 0, default=0)
        one = ("moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group")
        for key in (*one, "moe_layer_freq"):
            found[key] = self.integer(key, 1, default=1)
        _check_experts(found)
        return found

    def rope(self) -> RopeConfig:
        """Rotary embedding; the old spelling has rope_theta at the top, the rest in rope_scaling.

        The new one has all in rope_parameters.
        """
        rope = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise CheckpointError("rope_parameters (rope_scaling) must be an object or null")
        read = Reader(rope)
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        if kind not in ("default", "linear", "yarn"):
            raise CheckpointError(
                f"rope type {kind!r} is not supported; supported: default, linear, yarn"
            )
        theta = read if rope.get("rope_theta") is not None else self
        limit = self.integer("max_position_embeddings", 1)
        original = read.integer("original_max_position_embeddings", 1, default=limit)
        factor = read.number("factor", limit / original if kind == "yarn" else 1.0, above=0)
        given = rope.get("attention_factor") is not None
        return RopeConfig(
            theta=theta.number("rope_theta", 10000.0, above=1),
            kind=kind,
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=read.number("attention_factor", 1.0, above=0) if given else None,
            truncate=read.flag("truncate", True),
            **{key: read.number(key, default, above=0) for key, default in NUMBERS.items()},
        )


def _check_experts(moe: Mapping[str, Any]) -> None:
    experts, groups, top = moe["n_routed_experts"], moe["n_group"], moe["topk_group"]
    if not experts:
        return
    size, rest = divmod(experts, groups)
    if rest or size < 2:
        raise CheckpointError(
            f"n_routed_experts {experts} must split into n_group {groups} groups of at least 2"
        )
    if top > groups:
        raise CheckpointError(f"topk_group {top} exceeds n_group {groups}")
    if moe["num_experts_per_tok"] > top * size:
        raise CheckpointError(
            f"num_experts_per_tok {moe['num_experts_per_tok']} exceeds the "
            f"{top * size} experts of topk_group {top} groups"
        )
