"""The config.json of an EAGLE-3 head, in the spellings of its three makers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from mtpbuild.builder.checkpoint.config import HeadConfig, ModelConfig, Reader, fixed, flag, integer
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.runtime.contract.drafters import EAGLE
from mtpbuild.runtime.errors import CheckpointError

CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel")
SPECULATORS = "speculators_model_type"
TAPS = "eagle_aux_hidden_state_layer_ids"
MAX_TAPS = 16


def read_taps(read: Reader, key: str) -> tuple[int, ...] | None:
    """Read the numbers of the layers whose inputs are tapped; None: the usual ones."""
    if not read.flag("use_aux_hidden_state", True):
        return ()
    if (ids := read.raw.get(TAPS)) is None:
        return None
    if (
        not isinstance(ids, list)
        or len(ids) > MAX_TAPS
        or not all(type(i) is int and i >= 0 for i in ids)
    ):
        raise CheckpointError(f"{TAPS} must be a list of layers, not {ids!r}")
    return tuple(ids) or None


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(GroupedConfig, HeadConfig):
    """The values of a head; `vocab_size` is the trunk's, `draft_vocab_size` of its own head."""

    title = "an EAGLE-3 head"
    drafter = EAGLE
    input_projs = ("fc",)
    supported: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu", "mlp_bias": False, "num_hidden_layers": 1, "use_sliding_window": False
    }  # fmt: skip

    attention_bias: bool = flag(False)
    target_hidden_size: int = integer(1, 0)  # 0: hidden_size
    # Layers of the trunk whose inputs are read; (): the trunk's last hidden state instead.
    taps: tuple[int, ...] | None = field(default=None, metadata={"read": read_taps})
    draft_vocab_size: int = integer(1, 0)  # 0: the trunk's
    norm_before_residual: bool = flag(False)  # the layer adds to the normed g
    norm_before_fc: bool = flag(False)  # the taps have one norm together, as gpt-oss's heads
    fc_norm: bool = flag(False)  # each tap has one, as in EAGLE-3.1
    norm_output: bool = flag(False)  # the next g is normed
    embeds: bool = fixed(False)  # it has an embedding of its own
    has_head: bool = fixed(True)  # of its own

    @classmethod
    def of(cls, raw: Mapping[str, Any], trunk: ModelConfig, tensors: set[str]) -> Self:
        """Read a head's values; tensors: its names. Raises CheckpointError."""
        nested = [raw.get(key) for key in ("transformer_layer_config", "eagle_config")]
        values: dict[str, Any] = {"norm_before_residual": SPECULATORS in raw}
        for some in (*nested, raw):
            if isinstance(some, dict):
                values |= {name: value for name, value in some.items() if value is not None}
        if "sliding_attention" in str(values.get("layer_types")):
            raise CheckpointError("a head with a sliding window is not supported")
        config = cls.read(Reader(values))
        L = trunk.num_hidden_layers
        taps = (2, L // 2, L - 3) if config.taps is None else config.taps
        if any(not 0 <= tap <= L for tap in taps):
            raise CheckpointError(f"{TAPS} {[*taps]}: the trunk has {L} layers")
        width = config.target_hidden_size or config.hidden_size
        for key, theirs, ours in (
            ("hidden_size", width, trunk.hidden_size),
            ("vocab_size", config.vocab_size, trunk.vocab_size),
        ):
            if theirs != ours:
                raise CheckpointError(
                    f"its trunk has {key} {theirs}, the model {ours}: this head is another model's"
                )
        wanted = {"embed_tokens.weight", "lm_head.weight"} if config.hidden_size != width else set()
        if missing := sorted(wanted - tensors):
            raise CheckpointError(
                f"hidden_size {config.hidden_size} is not the trunk's {width}, so it needs its own "
                f"{missing[0]}"
            )
        embeds, has_head = (name in tensors for name in ("embed_tokens.weight", "lm_head.weight"))
        if config.tie_word_embeddings and embeds and not has_head:
            raise CheckpointError("tie_word_embeddings with its own embedding is not supported")
        return replace(
            config, taps=taps, target_hidden_size=width, embeds=embeds, has_head=has_head
        )

    @property
    def added_width(self) -> int:
        return self.hidden_size

    @property
    def drafted(self) -> int:
        return self.draft_vocab_size or self.vocab_size


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is an EAGLE-3 head's."""
    names = raw.get("architectures")
    named = isinstance(names, list) and any(name in CLASSES for name in names)
    return named or raw.get(SPECULATORS) == "eagle3"
