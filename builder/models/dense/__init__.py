"""Dense trunks of grouped-query attention: Llama, Mistral, Qwen2, Qwen3, and MiMo with its module.

They differ in biases, in the norms of queries and keys, and in what config.json may leave out.
Only MiMo's checkpoints hold an MTP module. `tune-head --new` makes one of its form for the others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mtpbuild.builder.checkpoint.config import ModuleInputs, ModuleNames, Reader, fixed, flag
from mtpbuild.builder.models.common.copies import list_tied_head
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.models.common.grouped_family import GROUPED
from mtpbuild.builder.models.family import Family, import_lazily
from mtpbuild.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from mtpbuild.builder.gguf.tensors import Architecture


def read_key_value_heads(read: Reader, key: str) -> int:
    """Read the number of key heads: Llama 2's first files leave it out, as each query has one."""
    return read.integer(key, 1, read.integer("num_attention_heads", 1))


@dataclass(frozen=True, kw_only=True)
class DenseConfig(GroupedConfig):
    """The values of a trunk without biases, whose layers all see the whole context.

    A module's input is [hidden ; embedding], with hidden states from before the final norm, as in
    vLLM (Xiaomi's code, PR #17433) and exllamav3 (PR #238: 88 % of first drafts accepted). SGLang
    passes normalised hidden states. No checkpoint has more than one module, so a second draft's
    input is undefined; like exllamav3, we use the state before `final_layernorm`.
    """

    module_names = ModuleNames(
        prefix="model.mtp_layers.",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        input_proj="input_proj",
        head_norm="final_layernorm",
    )

    supported: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "use_sliding_window": False,
    }  # fmt: skip

    attention_bias: bool = fixed(False)
    mtp: ModuleInputs = fixed(
        ModuleInputs(hidden_first=True, trunk_normed=False, recycles_normed=False)
    )

    @classmethod
    def read(cls, values: Reader) -> Self:
        kinds = values.raw.get("layer_types") or []
        if not isinstance(kinds, list) or {*map(str, kinds)} - {"full_attention"}:
            raise CheckpointError("layer_types: layers with a sliding window are not supported")
        return super().read(values)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DenseConfig):
    """Llama's values."""

    num_key_value_heads: int = field(metadata={"read": read_key_value_heads})


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DenseConfig):
    """Mistral's values; transformers gives a file without `sliding_window` one of 4096."""

    @classmethod
    def read(cls, values: Reader) -> Self:
        if "sliding_window" not in values.raw:
            raise CheckpointError("sliding_window is missing")
        window = values.raw["sliding_window"]
        if window is not None and values.integer("sliding_window", 1) < values.integer(
            "max_position_embeddings", 1
        ):
            raise CheckpointError(f"sliding_window {window} is not supported; supported: null")
        return super().read(values)


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(DenseConfig):
    """Qwen2's values: queries, keys and values have biases."""

    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "use_sliding_window": False}

    attention_bias: bool = fixed(True)


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DenseConfig):
    """Qwen3's values: queries and keys are normalised per head."""

    usual: ClassVar[dict[str, Any]] = {"head_dim": 128}

    use_qk_norm: bool = fixed(True)


@dataclass(frozen=True, kw_only=True)
class MimoConfig(Qwen2Config):
    """MiMo-7B's values: Qwen2's, and an MTP module in the checkpoint."""

    attention_bias: bool = flag(True)


def make_family(
    name: str,
    config: type[DenseConfig],
    gguf: "Callable[[], tuple[Architecture, ...]]" = tuple,
) -> Family:
    """Return the family of a class of transformers; gguf: lists its GGUF architectures."""
    return replace(
        GROUPED,
        name=f"{name}ForCausalLM",
        architectures=(f"{name}ForCausalLM",),
        model_type=name.lower(),
        config=config,
        copies=list_tied_head,
        gguf=gguf,
    )


GGUF = f"{__name__}.gguf"
FAMILIES = (
    make_family("Llama", LlamaConfig, import_lazily(GGUF, "list_llama")),
    make_family("Mistral", MistralConfig),
    make_family("Qwen2", Qwen2Config, import_lazily(GGUF, "list_qwen2")),
    make_family("Qwen3", Qwen3Config, import_lazily(GGUF, "list_qwen3")),
    make_family("MiMo", MimoConfig),
)
