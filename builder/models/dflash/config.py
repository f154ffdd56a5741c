"""The config.json of a DFlash or DSpark head."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from mtpbuild.builder.checkpoint.config import ModelConfig, Reader, fixed, flag
from mtpbuild.builder.models.common.block_config import BlockHeadConfig, read_layer_ids
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.runtime.errors import CheckpointError

CLASSES = ("DFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel")
NEXT_CLASS = "DFlash2DraftModel"
NESTED = "dflash_config"
SLIDING = "sliding_attention"
# Values of some heads, for trunks that are not here, that change what is computed.
NEUTRAL: dict[str, Any] = {
    "input_embedding_scale": 1, "output_multiplier": 1, "attention_value_scale": 1,
    "final_logit_softcapping": 0, "attention_sink_bias": False, "use_swa": False,
    "markov_head_type": "vanilla", "rope_is_neox_style": True,
}  # fmt: skip
MARKOV = "markov_head.markov_w1.weight"
OF_NEXT = ("candidate_selector.", "attention_conv.", "mlp_conv.")  # in names of DFlash2's tensors


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(GroupedConfig, BlockHeadConfig):
    """The values of a head, which has Qwen3's layers whatever its trunk has."""

    title = "a DFlash or DSpark head"
    input_projs = ("fc",)
    heads = ("markov_head.markov_w2",)
    supported: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip

    attention_bias: bool = flag(False)
    use_qk_norm: bool = fixed(True)
    # Of each layer: how many rows it sees, itself included (0: all), and whether a block's tokens
    # see only those before them.
    windows: tuple[int, ...] = fixed(())
    causal: tuple[bool, ...] = fixed(())

    @classmethod
    def of(cls, raw: Mapping[str, Any], trunk: ModelConfig, tensors: set[str]) -> Self:
        """Read a head's values; tensors: its names. Raises CheckpointError."""
        values = {**raw, **(raw[NESTED] if isinstance(raw.get(NESTED), dict) else {})}
        if NEXT_CLASS in str(raw.get("architectures")) or any(
            part in name for name in tensors for part in OF_NEXT
        ):
            raise CheckpointError(
                "DFlash2 heads, with convolutions and a candidate selector, are not supported"
            )
        read = Reader(values)
        for key, neutral in NEUTRAL.items():
            if values.get(key) not in (None, neutral):
                raise CheckpointError(f"{key} {values[key]!r} is not supported in {cls.title}")
        config = cls.read(read)
        for key, theirs, ours in (
            ("hidden_size", config.hidden_size, trunk.hidden_size),
            ("vocab_size", config.vocab_size, trunk.vocab_size),
            ("num_target_layers", values.get("num_target_layers"), trunk.num_hidden_layers),
        ):
            if theirs not in (None, ours):
                raise CheckpointError(
                    f"its trunk has {key} {theirs}, the model {ours}: this head is another model's"
                )
        if values.get("draft_vocab_size") not in (None, config.vocab_size):
            raise CheckpointError(f"a draft vocabulary is not supported in {cls.title}")
        has_markov = MARKOV in tensors
        windows, causal = read_attention(read, config.num_hidden_layers)
        size = read.integer("block_size", 2, 16)
        if max(windows) and min(filter(None, windows)) < size:
            raise CheckpointError(
                f"sliding_window {min(filter(None, windows))} is below block_size {size}"
            )
        return replace(
            config,
            block_size=size,
            mask_token_id=read.integer("mask_token_id", 0, most=config.vocab_size - 1),
            # The last layer's output is left out: some read it before the norm, some after it.
            taps=read_layer_ids(read, "target_layer_ids", trunk.num_hidden_layers - 1),
            markov_rank=read.integer("markov_rank", 1) if has_markov else 0,
            from_anchor=read.flag("sample_from_anchor", has_markov),
            windows=windows,
            causal=causal,
        )


def read_attention(read: Reader, count: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Read the window of each layer, and whether it is causal: so are those with a window."""

    def are_kinds(value: Any) -> bool:
        known = isinstance(value, list) and set(map(str, value)) <= {SLIDING, "full_attention"}
        return known and len(value) == count

    usual = ["full_attention"] * count
    expected = f"a list of {count} names, full_attention or {SLIDING}"
    sliding = [kind == SLIDING for kind in read.get("layer_types", usual, are_kinds, expected)]
    if any(sliding) and not read.flag("use_sliding_window", False):
        raise CheckpointError(f"layer_types has {SLIDING}, but use_sliding_window is false")
    window = read.integer("sliding_window", 1) if any(sliding) else 0
    whole = read.raw.get("is_causal") is None
    causal = [read.flag("causal" if whole else "is_causal", kind) for kind in sliding]
    if any(kind and not ordered for kind, ordered in zip(sliding, causal, strict=True)):
        raise CheckpointError("a sliding window that is not causal is not supported")
    return tuple(window if kind else 0 for kind in sliding), tuple(causal)


def is_dflash(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is such a head's."""
    names = raw.get("architectures")
    named = isinstance(names, list) and any(name in (*CLASSES, NEXT_CLASS) for name in names)
    return named or isinstance(raw.get(NESTED), dict)
