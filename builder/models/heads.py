"""The kinds of heads that draft in their trunk's steps in place of MTP modules."""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from mtpbuild.builder.checkpoint.config import HeadConfig, ModelConfig
from mtpbuild.builder.models.deepseek_v4.config import DSparkConfig, is_dspark
from mtpbuild.builder.models.deepseek_v4.names import rename_dspark_tensor
from mtpbuild.builder.models.dflash.config import DFlashConfig, is_dflash
from mtpbuild.builder.models.eagle3.config import Eagle3Config, is_eagle3
from mtpbuild.builder.models.family import import_lazily
from mtpbuild.builder.models.gemma4.assistant_config import AssistantConfig, is_assistant
from mtpbuild.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from mtpbuild.builder.gguf.tensors import Architecture
    from mtpbuild.builder.models.common.causal_lm import CausalLM
    from mtpbuild.builder.models.common.weight import Weight

FOLDER = __name__.rpartition(".")[0]
Trunk = TypeVar("Trunk", bound=ModelConfig)


@dataclass(frozen=True)
class Head:
    """A kind of head.

    attach: puts the head of the model's configuration in place of its modules. rename: a tensor's
    name in the model, None for one that is not read. gguf: the architectures of its GGUF files,
    whose tensors are renamed as those of safetensors files.
    """

    config: type[HeadConfig]
    weights: "Callable[[Any], Iterator[Weight]]"
    attach: "Callable[[CausalLM], object]"
    recognises: Callable[[Mapping[str, Any]], bool]  # its config.json
    # (its config.json, the trunk's configuration, its tensors' names without prefix)
    read: Callable[[Mapping[str, Any], ModelConfig, set[str]], HeadConfig]
    rename: Callable[[str], str | None]
    gguf: "Callable[[], tuple[Architecture, ...]]" = tuple


HEADS = (
    Head(
        Eagle3Config,
        import_lazily(f"{FOLDER}.eagle3.weights", "list_eagle3_weights"),
        import_lazily(f"{FOLDER}.eagle3.model", "attach_head"),
        is_eagle3,
        Eagle3Config.of,
        import_lazily(f"{FOLDER}.eagle3.weights", "rename_tensor"),
        import_lazily(f"{FOLDER}.eagle3.gguf", "list_heads"),
    ),
    Head(
        AssistantConfig,
        import_lazily(f"{FOLDER}.gemma4.assistant", "list_assistant_weights"),
        import_lazily(f"{FOLDER}.gemma4.assistant", "attach_assistant"),
        is_assistant,
        AssistantConfig.of,
        import_lazily(f"{FOLDER}.gemma4.assistant", "rename_tensor"),
        import_lazily(f"{FOLDER}.gemma4.gguf", "list_heads"),
    ),
    Head(
        DFlashConfig,
        import_lazily(f"{FOLDER}.dflash.weights", "list_dflash_weights"),
        import_lazily(f"{FOLDER}.dflash.model", "attach_dflash"),
        is_dflash,
        DFlashConfig.of,
        import_lazily(f"{FOLDER}.dflash.weights", "rename_dflash_tensor"),
        import_lazily(f"{FOLDER}.dflash.gguf", "list_block_heads"),  # of DeepSeek-V4's DSpark, too
    ),
    Head(  # also in its trunk's own checkpoint (`Family.find_head`)
        DSparkConfig,
        import_lazily(f"{FOLDER}.deepseek_v4.weights", "list_dspark_weights"),
        import_lazily(f"{FOLDER}.deepseek_v4.dspark", "attach_dspark"),
        is_dspark,
        DSparkConfig.of,
        rename_dspark_tensor,
    ),
)


def find_head(raw: Mapping[str, Any]) -> Head | None:
    """Return the kind of head that a config.json describes; None if it is none of them."""
    return next((head for head in HEADS if head.recognises(raw)), None)


def list_gguf_heads() -> "dict[str, Architecture]":
    """Return the architectures of heads' GGUF files, by name."""
    return {kind.name: kind for head in HEADS for kind in head.gguf()}


def find_head_of(config: HeadConfig) -> Head:
    return next(head for head in HEADS if isinstance(config, head.config))


def join_config(trunk: Trunk, raw: Mapping[str, Any], tensors: Set[str] = frozenset()) -> Trunk:
    """Return a trunk's configuration with the head that a config.json describes.

    tensors: the names of the head's, without a prefix. Raises CheckpointError.
    """
    head = find_head(raw)
    assert head is not None
    values = head.read(raw, trunk, {*tensors})
    if getattr(values, "taps", ()) and not trunk.has_taps:
        raise CheckpointError(f"{values.title} reads layers of its trunk, which this class hides")
    return replace(trunk, num_nextn_predict_layers=1, head=values)


def list_head_weights(config: ModelConfig, trunk: "list[Weight]") -> "list[Weight]":
    """Return a trunk's weight table with the rows of its head, if it has one."""
    from mtpbuild.builder.models.common.weight import DRAFT_HEAD

    if (head := config.head) is None:
        return trunk
    rows = [*find_head_of(head).weights(head)]
    has_head = any(row.name == "mtp.0.lm_head" for row in rows)
    return [*(row for row in trunk if row.name != DRAFT_HEAD or not has_head), *rows]
