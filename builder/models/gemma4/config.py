"""The `config.json` of Gemma-4, in the published spelling and in that of transformers 5.24."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from mtpbuild.builder.checkpoint.config import (
    COUNT_LIMIT,
    HEAD,
    KeyRows,
    MoEConfig,
    Reader,
    RopeConfig,
    fixed,
    flag,
    integer,
    number,
    parse_rope,
)
from mtpbuild.builder.models.costs import Costs, Split
from mtpbuild.runtime.errors import CheckpointError, UsageError
from mtpbuild.runtime.ranks import Ranks

SLIDING, FULL = "sliding_attention", "full_attention"  # names in `layer_types`
PATTERN = 6  # every sixth layer is full, if `layer_types` is missing
LAYER_TABLE = "model.embed_tokens_per_layer.weight"
LAYER_CONFIGS = "per_layer_config"  # transformers' key for sizes that differ between layers
ROWS_OF_SHARED = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\..+")
THETAS = {SLIDING: 1e4, FULL: 1e6}


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(MoEConfig):
    """The values of a text model, whose layers have two kinds of attention."""

    has_taps: ClassVar[bool] = False
    supported: ClassVar[dict[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    }  # fmt: skip
    usual: ClassVar[dict[str, Any]] = {
        "tie_word_embeddings": True, "head_dim": 256, "sliding_window": 512, "n_shared_experts": 0,
        "vocab_size_per_layer_input": 262144,
    }  # fmt: skip

    num_attention_heads: int = integer()
    full_layers: tuple[bool, ...] = field(metadata={"read": lambda read, key: read_kinds(read)})
    head_dim: int = integer()  # of layers with a window
    num_key_value_heads: int = integer()
    global_head_dim: int = integer()  # of the others
    num_global_key_value_heads: int = integer()
    sliding_window: int = integer()
    rope: RopeConfig = field(metadata={"read": lambda read, key: read_rope(read, SLIDING)})
    full_rope: RopeConfig = field(metadata={"read": lambda read, key: read_rope(read, FULL)})
    attention_k_eq_v: bool = flag(False)  # full layers take their raw keys as values
    num_kv_shared_layers: int = integer(0, 0)  # the last ones, which read earlier layers' rows
    use_double_wide_mlp: bool = flag(False)  # in these layers
    hidden_size_per_layer_input: int = integer(0, 0)
    vocab_size_per_layer_input: int = integer(0)
    final_logit_softcapping: float = number(0.0)
    moe_layers: tuple[bool, ...] = fixed(())

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        text = raw.get("text_config", raw)
        if not isinstance(text, dict):
            raise CheckpointError("text_config must be an object")
        return cls.read(Reader(cls.spell(text), cls.usual))

    @classmethod
    def spell(cls, text: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of both spellings in one, under the names of the fields."""
        mixture = text.get("enable_moe_block")
        values = {
            **text,
            "n_routed_experts": text.get("num_experts") if mixture else 0,
            "num_experts_per_tok": text.get("top_k_experts") if mixture else 1,
            "moe_intermediate_size": text.get("moe_intermediate_size") if mixture else 1,
        }
        sizes, heads = read_full_sizes(text), text.get("num_key_value_heads")
        width = text.get("global_head_dim", 512)
        if sizes is not None:
            width = sizes.get("head_dim", text.get("head_dim"))
            heads = sizes.get("num_key_value_heads", heads)
        elif text.get("attention_k_eq_v"):
            heads = text.get("num_global_key_value_heads") or heads
        values["global_head_dim"] = width or cls.usual["head_dim"]
        values["num_global_key_value_heads"] = heads
        return values

    @classmethod
    def read(cls, values: Reader) -> Self:
        if values.raw.get("use_bidirectional_attention") not in (None, "vision"):
            raise CheckpointError("use_bidirectional_attention: text that sees later tokens")
        return super().read(values)

    def check(self) -> None:
        super().check()
        for layer in range(self.num_hidden_layers):
            heads, groups = self.num_attention_heads, self.key_heads(layer)
            if heads % groups:
                raise CheckpointError(
                    f"num_attention_heads {heads} must be a multiple of layer {layer}'s "
                    f"{groups} heads of keys"
                )
            if self.width(layer) % 2:
                raise CheckpointError(f"the head size {self.width(layer)} of a layer must be even")
        self.check_shared()

    def check_shared(self) -> None:
        """Raise CheckpointError if layers share rows that no layer has."""
        if self.num_kv_shared_layers and {*self.last_rows} != {*self.full_layers}:
            raise CheckpointError(
                f"num_kv_shared_layers {self.num_kv_shared_layers}: no layer before them has rows "
                "that they could read"
            )

    def sliced(self, first: int, count: int) -> Self:
        if self.hidden_size_per_layer_input:
            raise UsageError("--layers: this model has one table for the inputs of all its layers")
        kinds = self.full_layers[first : first + count]
        shared = max(0, first + count - self.first_shared) if self.num_kv_shared_layers else 0
        if not any(kinds) or (shared and first + count - shared <= first):
            raise UsageError(
                f"--layers {first}-{first + count - 1} has no layer of its own that sees all rows, "
                "which an engine needs"
            )
        return replace(super().sliced(first, count), full_layers=kinds, num_kv_shared_layers=shared)

    def is_moe(self, layer: int) -> bool:
        return self.n_routed_experts > 0

    def find_key_rows(self, at: str) -> KeyRows | None:
        layer = int(at.removesuffix(".").rpartition(".")[2])
        if at.startswith(f"{HEAD}."):
            assert self.head is not None
            layer = self.head.list_read_layers(self)[layer]
        elif layer >= self.first_shared:
            layer = self.last_rows[self.full_layers[layer]]
        width, queries = self.width(layer), self.num_attention_heads // self.key_heads(layer)
        name = f"model.layers.{layer}."
        return KeyRows(name, width, width, queries, has_norm=True, has_bias=False)

    @property
    def last_rows(self) -> dict[bool, int]:
        """The last layer of each kind that has rows, by whether it sees all of them."""
        return {full: i for i, full in enumerate(self.full_layers[: self.first_shared])}

    @property
    def first_shared(self) -> int:
        """The first layer without rows of its own, or the number of layers."""
        return max(0, self.num_hidden_layers - self.num_kv_shared_layers)

    def width(self, layer: int) -> int:
        """Return the size of a layer's heads."""
        return self.global_head_dim if self.full_layers[layer] else self.head_dim

    def key_heads(self, layer: int) -> int:
        full = self.full_layers[layer]
        return self.num_global_key_value_heads if full else self.num_key_value_heads

    def shares_values(self, layer: int) -> bool:
        """Return whether a layer's values are its keys, before their norm and rotation."""
        return self.attention_k_eq_v and self.full_layers[layer]

    def inner(self, layer: int) -> int:
        """Return the inner size of a layer's dense MLP."""
        wide = self.use_double_wide_mlp and layer >= self.first_shared
        return self.intermediate_size * (2 if wide else 1)


def read_kinds(read: Reader) -> tuple[bool, ...]:
    """Read which layers see all rows; the last one always does."""
    count = read.integer("num_hidden_layers", 1, most=COUNT_LIMIT)

    def valid(value: Any) -> bool:
        known = isinstance(value, list) and set(map(str, value)) <= {SLIDING, FULL}
        return known and len(value) == count

    usual = [SLIDING if (i + 1) % PATTERN else FULL for i in range(count)]
    kinds = read.get("layer_types", usual, valid, f"a list of {count} names, {SLIDING} or {FULL}")
    return (*(kind == FULL for kind in kinds[:-1]), True)


def read_full_sizes(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the sizes of layers that see all rows, as far as they differ from the others'.

    None: the file has them in the published spelling.
    """
    configs = text.get(LAYER_CONFIGS)
    if configs is None:
        return None
    if not isinstance(configs, dict) or not all(isinstance(v, dict) for v in configs.values()):
        raise CheckpointError(f"{LAYER_CONFIGS} must be an object of objects")
    kinds = text.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []  # `read_kinds` refuses what is none
    sizes = [configs.get(str(i), configs.get(str(kind), {})) for i, kind in enumerate(kinds)]
    full = [size for size, kind in zip(sizes, kinds, strict=True) if kind == FULL]
    others = [size for size, kind in zip(sizes, kinds, strict=True) if kind != FULL]
    if any(size != full[0] for size in full[1:]) or any(others):
        raise CheckpointError(f"{LAYER_CONFIGS}: layers of one kind with different sizes")
    return full[0] if full else {}


def read_rope(read: Reader, kind: str) -> RopeConfig:
    """Read the rotary embedding of one kind of layers."""
    both = read.raw.get("rope_parameters") or {}
    if not isinstance(both, dict) or not isinstance(stored := both.get(kind) or {}, dict):
        raise CheckpointError("rope_parameters must hold an object for each kind of layers")
    values: dict[str, Any] = {"rope_theta": THETAS[kind]} | stored
    if kind == FULL:
        values = {"rope_type": "proportional", "partial_rotary_factor": 0.25} | values
    limit = read.raw.get("max_position_embeddings")
    return parse_rope(Reader({"rope_parameters": values, "max_position_embeddings": limit}))


def cache_widths(c: Gemma4Config, ranks: Ranks) -> list[int]:
    """Return the width of each layer's cache rows; layers that read others' rows have none."""
    widths = [2 * c.key_heads(i) * c.width(i) for i in range(c.first_shared)]
    return widths + [0] * c.num_kv_shared_layers


def cache_sections(c: Gemma4Config, layer: int) -> tuple[int, ...]:
    """Return the size of a cache row's parts, the keys and the values of a head."""
    return (c.width(layer),)


def list_windows(c: Gemma4Config) -> list[int]:
    """Return how many rows each layer sees; 0: all."""
    return [0 if full else c.sliding_window for full in c.full_layers]


def split_sizes(c: Gemma4Config, ranks: Ranks) -> list[Split]:
    return [Split("the number of ranks of an engine of Gemma-4,", 1, ranks.tp)]


def costs(c: Gemma4Config, ranks: Ranks) -> Costs:
    """Return a step's costs; a layer's are the mean over all layers."""
    L = c.num_hidden_layers
    values = sum(map(c.width, range(L))) * c.num_attention_heads / L
    dense = 3.0 * max(map(c.inner, range(L)))
    experts = c.num_experts_per_tok * (2 * c.moe_intermediate_size + c.hidden_size)
    inner = dense + (experts if c.n_routed_experts else 0)
    return Costs(
        row_operations=4.0 * values,
        activations=max(4.0 * values, inner) + 4 * c.hidden_size,
        experts=c.n_routed_experts,
        chosen=c.num_experts_per_tok if c.n_routed_experts else 0,
    )


def is_left_out(c: Gemma4Config, name: str) -> bool:
    """Return whether a checkpoint may hold a tensor that no engine reads: rows of shared layers."""
    match = ROWS_OF_SHARED.fullmatch(name)
    return match is not None and int(match[1]) >= c.first_shared
