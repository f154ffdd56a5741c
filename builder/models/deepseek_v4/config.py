"""DeepSeek-V4's `config.json`, in the published spelling and in that of transformers 5.24."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from mtpbuild.builder.checkpoint.config import (
    COUNT_LIMIT,
    ModelConfig,
    ModuleInputs,
    ModuleNames,
    MoEConfig,
    Reader,
    RopeConfig,
    fixed,
    integer,
    number,
    parse_rope,
)
from mtpbuild.builder.models.common.block_config import BlockHeadConfig, read_layer_ids
from mtpbuild.builder.models.costs import Costs, Split
from mtpbuild.builder.models.deepseek_v4.names import CONFIDENCE
from mtpbuild.builder.models.family import CachedRows
from mtpbuild.runtime.contract.state import BLOCK
from mtpbuild.runtime.errors import CheckpointError, UsageError
from mtpbuild.runtime.ranks import Ranks

SLIDING, SPARSE, HEAVY = (
    "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
)  # fmt: skip
RATIOS = {SLIDING: 0, SPARSE: 4, HEAVY: 128}
HASHED, ROUTED = "hash_moe", "moe"
DSPARK_INPUT = "mtp.0.main_proj.weight"  # a tensor that only a DSpark head has
CHOOSING = 4  # the published ratio whose layers choose rows
DSPARK_BLOCK = "dspark_block_size"
# Values of a head that are its trunk's, and that no shape of a weight tells.
OF_TRUNK = (
    "hidden_size", "vocab_size", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "sliding_window", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps", "swiglu_limit",
    "num_experts_per_tok", "routed_scaling_factor",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(MoEConfig):
    """The values of a model with residual streams, whose attention reads compressed rows."""

    module_names: ClassVar[ModuleNames] = ModuleNames(prefix="mtp.", input_proj="h_proj")
    supported: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu", "scoring_func": "sqrtsoftplus", "attention_bias": False,
        "mlp_bias": False, "num_key_value_heads": 1, "norm_topk_prob": True,
    }  # fmt: skip
    usual: ClassVar[dict[str, Any]] = {
        "intermediate_size": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
        "n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
    }  # fmt: skip

    num_attention_heads: int = integer()
    head_dim: int = integer(1, 512)
    qk_rope_head_dim: int = integer(2, 64)
    q_lora_rank: int = integer(1, 1024)
    o_groups: int = integer(1, 8)
    o_lora_rank: int = integer(1, 1024)
    sliding_window: int = integer(1, 128)
    index_n_heads: int = integer(1, 64)
    index_head_dim: int = integer(1, 128)
    index_topk: int = integer(1, 512)
    hc_mult: int = integer(1, 4)
    hc_sinkhorn_iters: int = integer(1, 20)
    hc_eps: float = number(1e-6, above=0)
    swiglu_limit: float = number(10.0, above=0)
    # Of each layer: how many tokens make a compressed row (0: there are none), whether it chooses
    # such rows, and whether the token alone chooses its experts.
    ratios: tuple[int, ...] = field(metadata={"read": lambda read, key: read_kinds(read)[0]})
    choosing: tuple[bool, ...] = field(metadata={"read": lambda read, key: read_kinds(read)[1]})
    hashed: tuple[bool, ...] = field(metadata={"read": lambda read, key: read_hashed(read)})
    rope: RopeConfig = field(metadata={"read": lambda read, key: read_one_rope(read, "main")})
    row_rope: RopeConfig = field(
        metadata={"read": lambda read, key: read_one_rope(read, "compress")}
    )
    moe_layers: tuple[bool, ...] = fixed(())
    mtp: ModuleInputs = fixed(ModuleInputs(trunk_normed=False, recycles_normed=False))

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        read = Reader(raw, cls.usual)
        if raw.get("qk_rope_head_dim") is None and raw.get("partial_rotary_factor") is not None:
            share = min(read.number("partial_rotary_factor", 1.0, above=0), 2.0)  # 1 at most is fit
            size = int(read.integer("head_dim", 1, 512) * share)
            read = Reader({**raw, "qk_rope_head_dim": size}, cls.usual)
        return cls.read(read)

    def check(self) -> None:
        super().check()
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.head_dim:
            raise CheckpointError(
                f"qk_rope_head_dim {self.qk_rope_head_dim} must be even and within a head's "
                f"{self.head_dim} numbers"
            )
        if any(self.choosing) and self.index_head_dim < self.qk_rope_head_dim:
            raise CheckpointError(
                f"index_head_dim {self.index_head_dim} is below qk_rope_head_dim "
                f"{self.qk_rope_head_dim}, of which its rotary part is"
            )
        if self.num_attention_heads % self.o_groups:
            raise CheckpointError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of o_groups "
                f"{self.o_groups}"
            )
        if wrong := [r for r in self.ratios if r and (r & (r - 1) or r > 2 * BLOCK)]:
            raise CheckpointError(
                f"compress_ratios: {wrong[0]} tokens in a row; powers of two up to {2 * BLOCK} are "
                "supported"
            )
        if not any(self.ratios):
            raise CheckpointError("compress_ratios: an engine needs a layer with compressed rows")

    def sliced(self, first: int, count: int) -> Self:
        end = first + count
        if not any(self.ratios[first:end]):
            raise UsageError(
                f"--layers {first}-{end - 1} has no layer with compressed rows, which an engine "
                "needs"
            )
        return replace(
            super().sliced(first, count),
            ratios=self.ratios[first:end],
            choosing=self.choosing[first:end],
            hashed=self.hashed[first:end],
        )

    def is_moe(self, layer: int) -> bool:
        return True

    @property
    def step_width(self) -> int:
        return self.hc_mult * self.hidden_size + (self.head.added_width if self.head else 0)

    def ratio(self, layer: int) -> int:
        """Return how many tokens make a compressed row; 0: the layer has none, as modules."""
        return self.ratios[layer] if layer < self.num_hidden_layers else 0

    def chooses(self, layer: int) -> bool:
        return layer < self.num_hidden_layers and self.choosing[layer]

    def is_hashed(self, layer: int) -> bool:
        return layer < self.num_hidden_layers and self.hashed[layer]

    def group(self, layer: int) -> int:
        """Return the number of tokens whose places in a cache hold a compressed row."""
        return min(self.ratio(layer), BLOCK)

    def open_width(self, layer: int) -> int:
        """Return the width of a token's projections: values and gates of each kind of rows."""
        return 2 * (1 + self.chooses(layer)) * self.row_width(layer)

    def row_width(self, layer: int) -> int:
        """Return the width of a compressed row: keys that are values, then an indexer's key."""
        return self.head_dim + self.chooses(layer) * self.index_head_dim


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DeepseekV4Config, BlockHeadConfig):
    """The values of a DSpark head: those of its trunk, and of its block."""

    title = "a DSpark head"
    input_projs = ("main_proj",)
    heads = ("markov_head.markov_w2",)

    stages: int = fixed(0)  # its layers

    @property
    def cached_layers(self) -> int:
        return self.stages

    @classmethod
    def of(cls, raw: Mapping[str, Any], trunk: ModelConfig, tensors: set[str]) -> Self:
        """Read the values of a head of other files; tensors: its names. Raises CheckpointError."""
        if not isinstance(trunk, DeepseekV4Config):
            raise CheckpointError("a DSpark head of DeepSeek-V4, which the model is not")
        for key in OF_TRUNK:
            theirs, ours = raw.get(key), getattr(trunk, key)
            real = type(theirs) in (int, float)
            if theirs is not None and not (real and math.isclose(theirs, ours, rel_tol=1e-6)):
                raise CheckpointError(
                    f"its trunk has {key} {theirs}, the model {ours}: this head is another model's"
                )
        numbers = {name.split(".")[1] for name in tensors}
        return cls.join(trunk, raw, len(numbers))

    @classmethod
    def join(cls, trunk: DeepseekV4Config, raw: Mapping[str, Any], stages: int) -> Self:
        """Return the values of a head of so many layers, which are its trunk's but for a few."""
        read, values = Reader(raw), {part.name: getattr(trunk, part.name) for part in fields(trunk)}
        read.only(dspark_markov_head_type="vanilla", dspark_window_size=trunk.sliding_window)
        values |= {"num_nextn_predict_layers": 0, "head": None}
        return cls(
            **values,
            stages=stages,
            from_anchor=True,
            block_size=read.integer(DSPARK_BLOCK, 1),
            mask_token_id=read.integer("dspark_noise_token_id", 0, most=trunk.vocab_size - 1),
            taps=read_layer_ids(read, "dspark_target_layer_ids", trunk.num_hidden_layers),
            markov_rank=read.integer("dspark_markov_rank", 1, 256),
        )


def is_dspark(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a checkpoint with such a head."""
    return raw.get(DSPARK_BLOCK) is not None


def find_dspark(
    trunk: DeepseekV4Config, raw: Mapping[str, Any], names: Collection[str]
) -> DSparkConfig | None:
    """Return the values of the DSpark head among a checkpoint's tensors; None if none is there.

    names: of the tensors; without any, the configuration decides.
    """
    if not (DSPARK_INPUT in names if names else raw.get(DSPARK_BLOCK)):
        return None
    ratios = len(raw.get("compress_ratios") or ()) - trunk.num_hidden_layers  # the stages' after it
    stages = trunk.num_nextn_predict_layers if names else max(1, ratios)
    return DSparkConfig.join(trunk, raw, stages)


def is_left_out(c: DeepseekV4Config, name: str) -> bool:
    """Return whether a tensor is of a head's confidences, which no step reads."""
    return c.head is not None and CONFIDENCE in name


def read_kinds(read: Reader) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Read how many tokens each layer compresses to a row, and which layers choose rows.

    The published spelling has numbers, with those of the modules after the trunk's; that of
    transformers has a kind for each layer, and a number for each kind.
    """
    count = read.integer("num_hidden_layers", 1, most=COUNT_LIMIT)

    def are_ratios(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) >= count
            and all(type(number) is int and 0 <= number <= COUNT_LIMIT for number in value)
        )

    def are_kinds(value: Any) -> bool:
        return isinstance(value, list) and len(value) == count and set(map(str, value)) <= {*RATIOS}

    def are_rates(value: Any) -> bool:
        return isinstance(value, dict) and all(type(rate) is int for rate in value.values())

    ratios = read.get("compress_ratios", None, are_ratios, f"a list of {count} numbers or more")
    if ratios is not None:
        return tuple(ratios[:count]), tuple(ratio == CHOOSING for ratio in ratios[:count])
    usual = [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(count)]
    names = ", ".join(RATIOS)
    kinds = read.get("layer_types", usual, are_kinds, f"a list of {count} names of {names}")
    rates = RATIOS | read.get("compress_rates", {}, are_rates, "an object of numbers")
    return tuple(rates[kind] for kind in kinds), tuple(kind == SPARSE for kind in kinds)


def read_hashed(read: Reader) -> tuple[bool, ...]:
    """Read in which layers the token alone chooses the experts."""
    count = read.integer("num_hidden_layers", 1, most=COUNT_LIMIT)
    first = read.integer("num_hash_layers", 0, 3)

    def are_kinds(value: Any) -> bool:
        known = isinstance(value, list) and set(map(str, value)) <= {HASHED, ROUTED}
        return known and len(value) == count

    usual = [HASHED if i < first else ROUTED for i in range(count)]
    expected = f"a list of {count} names, {HASHED} or {ROUTED}"
    kinds = read.get("mlp_layer_types", usual, are_kinds, expected)
    return tuple(kind == HASHED for kind in kinds)


def read_one_rope(read: Reader, kind: str) -> RopeConfig:
    """Read the rotary embedding of layers without compressed rows (main) or with (compress).

    YaRN, which the latter have, does not scale their cosines here.
    """
    stored = read.raw.get("rope_parameters") or read.raw.get("rope_scaling") or {}
    theta, usual = ("rope_theta", 1e4) if kind == "main" else ("compress_rope_theta", 1.6e5)
    if not isinstance(stored, dict) or not isinstance(stored.get(kind, {}), dict):
        raise CheckpointError("rope_parameters (rope_scaling) must be an object")
    values: dict[str, Any] = {"rope_theta": read.number(theta, usual, above=1)}
    nested = isinstance(stored.get(kind), dict)
    if nested or kind == "compress":
        values = {**(stored[kind] if nested else stored), **({} if nested else values)}
    values.pop("partial_rotary_factor", None)
    if "yarn" in (values.get("rope_type"), values.get("type")):
        values = {"attention_factor": 1.0} | values
    limit = read.raw.get("max_position_embeddings")
    return parse_rope(Reader({"rope_parameters": values, "max_position_embeddings": limit}))


def cache_widths(c: DeepseekV4Config, ranks: Ranks) -> list[int]:
    """Return the width of each layer's rows of single tokens, keys that are values."""
    modules = c.head.cached_layers if c.head else c.num_nextn_predict_layers
    return [c.head_dim] * (c.num_hidden_layers + modules)


def list_compressed_rows(c: DeepseekV4Config) -> list[CachedRows]:
    """List the rows beside those of single tokens, of the layers that compress.

    `compressed` has a compressed row in the places of the last tokens that it is made of, and
    `open` the projections of single tokens, of which the next rows are made.
    """
    rows = list[CachedRows]()
    for i, ratio in enumerate(c.ratios):
        if ratio:
            width = -(-c.row_width(i) // c.group(i))
            rows.append(CachedRows("compressed", i, width, tokens=ratio))
            rows.append(CachedRows("open", i, c.open_width(i), window=(1 + c.chooses(i)) * ratio))
    return rows


def list_windows(c: DeepseekV4Config) -> list[int]:
    return [c.sliding_window] * c.num_hidden_layers


def split_sizes(c: DeepseekV4Config, ranks: Ranks) -> list[Split]:
    return [Split("the number of ranks of an engine of DeepSeek-V4,", 1, ranks.tp)]


def costs(c: DeepseekV4Config, ranks: Ranks) -> Costs:
    """Return a step's costs; a layer's are the mean over all layers."""
    heads = c.num_attention_heads
    inner = c.num_experts_per_tok * (2 * c.moe_intermediate_size + c.hidden_size)
    return Costs(
        row_operations=4.0 * heads * c.head_dim,
        activations=max(3.0 * heads * c.head_dim, inner) + (4 + 2 * c.hc_mult) * c.hidden_size,
        experts=c.n_routed_experts,
        chosen=c.num_experts_per_tok,
        most_rows=max(c.sliding_window, c.index_topk),
        attended=c.head_dim,
        scoring=2.0 * c.index_n_heads * c.index_head_dim,
    )
