"""The `config.json` of Qwen3.5 and Qwen3-Next, and the costs of their sizes.

A text model may be wrapped together with a vision tower, which is left out; its values are then in
`text_config`. The rotary embedding has three parts, but the positions of text are equal in all of
them, so it is a plain one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from mtpbuild.builder.checkpoint.config import (
    COUNT_LIMIT,
    MODULE_COUNT,
    ModuleNames,
    MoEConfig,
    Reader,
    fixed,
    flag,
    integer,
)
from mtpbuild.builder.models.common import grouped_config
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.models.costs import Costs, Split
from mtpbuild.builder.models.family import Recurrent
from mtpbuild.runtime.errors import CheckpointError, UsageError
from mtpbuild.runtime.ranks import Ranks

MODULE_NAMES = ModuleNames(
    prefix="mtp.layers.",
    own_prefix="mtp.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    input_proj="fc",
    head_norm="norm",
    count="mtp_num_hidden_layers",
)
# What transformers' classes take for values that config.json leaves out.
USUAL: dict[str, Any] = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
USUAL_MOE: dict[str, Any] = USUAL | {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "intermediate_size": 512,
}  # fmt: skip
USUAL_NEXT: dict[str, Any] = USUAL_MOE | {
    "n_routed_experts": 512, "num_experts_per_tok": 10, "intermediate_size": 5632,
}  # fmt: skip
ATTENTION, DELTA = "full_attention", "linear_attention"  # names in `layer_types`
SPARSE_STEP = "decoder_sparse_step"
STATES = ("conv", "delta")


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(MoEConfig, GroupedConfig):
    """The values of a model whose layers are attention or a gated delta rule."""

    module_names = MODULE_NAMES
    norms_minus_one = True
    supported: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False,
    }  # fmt: skip

    attention_bias: bool = fixed(False)
    use_qk_norm: bool = fixed(True)
    output_gate: bool = fixed(True)
    softmax_router: bool = fixed(True)
    linear_conv_kernel_dim: int = integer(2)
    linear_key_head_dim: int = integer()
    linear_value_head_dim: int = integer()
    linear_num_key_heads: int = integer()
    linear_num_value_heads: int = integer()
    shared_expert_intermediate_size: int = integer(0, 0)
    delta_layers: tuple[bool, ...] = field(metadata={"read": lambda read, key: delta_layers(read)})
    moe_layers: tuple[bool, ...] = field(metadata={"read": lambda read, key: moe_layers(read)})
    packed: bool = flag(False)  # the delta rule's projections are stored one key head at a time

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        text = raw.get("text_config", raw)
        if not isinstance(text, dict):
            raise CheckpointError("text_config must be an object")
        names = (text.get("model_type"), raw.get("model_type"), raw.get("architectures"))
        kind = str(names).lower()
        packed = "next" in kind
        mixture = "moe" in kind or text.get("num_experts")
        usual = USUAL_NEXT if packed else USUAL_MOE if mixture else USUAL
        dense = not text.get("num_experts", usual.get("n_routed_experts"))
        values = read_text_values(raw, text, dense=dense) | {"packed": packed}
        return cls.read(Reader(values, usual))

    @property
    def delta_keys(self) -> int:
        """Count the values of all key heads of a delta rule."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def delta_values(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def channels(self) -> int:
        """Count the values of a token that go through the convolution: queries, keys, values."""
        return 2 * self.delta_keys + self.delta_values

    def sliced(self, first: int, count: int) -> Self:
        delta = self.delta_layers[first : first + count]
        if all(delta):
            raise UsageError(
                f"--layers {first}-{first + count - 1} has no layer with attention, which an "
                f"engine needs: the first one is {self.delta_layers.index(False)}"
            )
        return replace(super().sliced(first, count), delta_layers=delta)

    def check(self) -> None:
        super().check()
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise CheckpointError(
                f"linear_num_value_heads {values} must be a multiple of linear_num_key_heads {keys}"
            )
        if all(self.delta_layers):
            raise CheckpointError(f"layer_types has no {ATTENTION}, which an engine needs")
        if self.num_nextn_predict_layers > 1:
            raise CheckpointError(
                f"{MODULE_NAMES.count} {self.num_nextn_predict_layers} is not supported: nobody "
                "has defined what more than one MTP module shares"
            )


def read_text_values(
    raw: Mapping[str, Any], text: Mapping[str, Any], *, dense: bool
) -> dict[str, Any]:
    """Return the text model's values under the names that other families have."""
    renamed = {
        MODULE_COUNT: text.get(MODULE_NAMES.count, raw.get(MODULE_COUNT)),
        "tie_word_embeddings": raw.get("tie_word_embeddings", text.get("tie_word_embeddings")),
        "n_routed_experts": text.get("num_experts"),
        "n_shared_experts": 0,  # the shared expert has a gate, so it does not count here
    }
    if dense:  # its file may have these sizes, as zeros
        renamed |= dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size", SPARSE_STEP))
    return {**text, **renamed}


def delta_layers(read: Reader) -> tuple[bool, ...]:
    """Read which layers are a delta rule, from `layer_types`; by default every fourth is not."""
    count = read.integer("num_hidden_layers", 1, most=COUNT_LIMIT)
    every = read.integer("full_attention_interval", 1, 4)

    def valid(value: Any) -> bool:
        known = isinstance(value, list) and set(map(str, value)) <= {ATTENTION, DELTA}
        return known and len(value) == count

    usual = [DELTA if (i + 1) % every else ATTENTION for i in range(count)]
    expected = f"a list of {count} names, {ATTENTION} or {DELTA}"
    return tuple(kind == DELTA for kind in read.get("layer_types", usual, valid, expected))


def moe_layers(read: Reader) -> tuple[bool, ...]:
    """Read which layers have experts, if the model has any; MTP modules always have them."""
    count = read.integer("num_hidden_layers", 1, most=COUNT_LIMIT)
    every = read.integer(SPARSE_STEP, 1, 1)

    def valid(value: Any) -> bool:
        return isinstance(value, list) and all(type(i) is int and 0 <= i < count for i in value)

    dense = read.get("mlp_only_layers", [], valid, f"a list of layers below {count}")
    trunk = (i not in dense and (i + 1) % every == 0 for i in range(count))
    return (*trunk, *[True] * read.integer(MODULE_COUNT, 0, 0, COUNT_LIMIT))


def cache_widths(c: Qwen35Config, ranks: Ranks) -> list[int]:
    """Return the width of each layer's cache rows; a delta rule has none."""
    widths = grouped_config.cache_widths(c, ranks)
    modules = widths[c.num_hidden_layers :]
    return [0 if delta else w for delta, w in zip(c.delta_layers, widths, strict=False)] + modules


def recurrent(c: Qwen35Config, ranks: Ranks) -> list[Recurrent]:
    """Return the states of the delta rules: a convolution's last inputs, and a matrix per head."""
    conv = {"taps": c.linear_conv_kernel_dim - 1, "channels": c.channels // ranks.parts}
    delta = {
        "heads": c.linear_num_value_heads // ranks.parts,
        "keys": c.linear_key_head_dim,
        "values": c.linear_value_head_dim,
    }
    return [
        Recurrent(name, i, sizes)
        for i, is_delta in enumerate(c.delta_layers)
        if is_delta
        for name, sizes in zip(STATES, (conv, delta), strict=True)
    ]


def split_sizes(c: Qwen35Config, ranks: Ranks) -> list[Split]:
    splits = grouped_config.split_sizes(c, ranks)
    if any(c.delta_layers):
        splits.append(Split("linear_num_key_heads", c.linear_num_key_heads, ranks.parts))
        splits.append(Split("value heads x width", c.delta_values, ranks.parts, "attention"))
    if c.n_routed_experts and (inner := c.shared_expert_intermediate_size):
        name = "shared_expert_intermediate_size"
        splits.append(Split(name, inner, ranks.parts, "shared experts"))
    return splits


def costs(c: Qwen35Config, ranks: Ranks) -> Costs:
    grouped = grouped_config.costs(c, ranks)
    delta = 3 * (c.channels + c.delta_values) / ranks.parts + 4 * c.hidden_size
    return replace(grouped, activations=max(grouped.activations, delta))
