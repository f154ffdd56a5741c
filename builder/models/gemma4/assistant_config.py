"""The `config.json` of Gemma-4's assistant, a head that reads the trunk's cache rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from mtpbuild.builder.checkpoint.config import HeadConfig, ModelConfig, Reader, flag, integer
from mtpbuild.builder.models.gemma4.config import Gemma4Config
from mtpbuild.runtime.contract.drafters import ASSISTANT
from mtpbuild.runtime.errors import CheckpointError

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
ABSENT = ("enable_moe_block", "hidden_size_per_layer_input", "use_double_wide_mlp")


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(Gemma4Config, HeadConfig):
    """The values of the head, whose layers all read the trunk's rows."""

    title = "Gemma-4's assistant"
    drafter = ASSISTANT
    input_projs = ("pre_projection", "post_projection")
    heads = ("embed_tokens",)
    usual: ClassVar[dict[str, Any]] = Gemma4Config.usual | {"hidden_size_per_layer_input": 0}

    backbone_hidden_size: int = integer()
    use_ordered_embeddings: bool = flag(False)  # the head's tokens are grouped round centroids
    num_centroids: int = integer(1, 2048)
    centroid_intermediate_top_k: int = integer(1, 32)

    @classmethod
    def of(cls, raw: Mapping[str, Any], trunk: ModelConfig, tensors: set[str]) -> Self:
        """Read the values of a trunk's head; raise CheckpointError if it is another trunk's."""
        if not isinstance(trunk, Gemma4Config):
            raise CheckpointError(f"{cls.title} is for Gemma-4, which this trunk is not")
        if not isinstance(text := raw.get("text_config"), dict):
            raise CheckpointError("text_config must be an object")
        if wrong := [key for key in ABSENT if text.get(key)]:
            raise CheckpointError(f"{wrong[0]} of {cls.title} is not supported")
        outer = {key: value for key, value in raw.items() if key != "text_config"}
        all_shared = {"num_kv_shared_layers": text.get("num_hidden_layers")}
        config = cls.read(Reader(outer | cls.spell(text) | all_shared, cls.usual))
        config.check_trunk(trunk)
        centroids, chosen = config.num_centroids, config.centroid_intermediate_top_k
        if config.use_ordered_embeddings and (config.vocab_size % centroids or chosen > centroids):
            raise CheckpointError(
                f"num_centroids {centroids} must divide vocab_size {config.vocab_size}, and be at "
                f"least centroid_intermediate_top_k {chosen}"
            )
        return config

    def check_trunk(self, trunk: Gemma4Config) -> None:
        """Raise CheckpointError if the head does not fit the trunk's rows."""
        mine = {"backbone_hidden_size": self.backbone_hidden_size, "vocab_size": self.vocab_size}
        theirs = {"backbone_hidden_size": trunk.hidden_size, "vocab_size": trunk.vocab_size}
        keys = list[str]()
        if any(self.full_layers):
            keys += ["global_head_dim", "num_global_key_value_heads", "full_rope"]
        if not all(self.full_layers):
            keys += ["head_dim", "num_key_value_heads", "rope", "sliding_window"]
        mine |= {key: getattr(self, key) for key in keys}
        theirs |= {key: getattr(trunk, key) for key in keys}
        for key, value in mine.items():
            if value != theirs[key]:
                raise CheckpointError(
                    f"its trunk has {key} {value}, the model {theirs[key]}: this head is another "
                    "model's"
                )
        if not {*self.full_layers} <= trunk.last_rows.keys():
            raise CheckpointError("it reads rows of a kind of layers that the model does not have")

    def list_read_layers(self, trunk: ModelConfig) -> list[int]:
        assert isinstance(trunk, Gemma4Config)
        return [trunk.last_rows[full] for full in self.full_layers]

    def check_shared(self) -> None:
        """Do nothing: the rows are the trunk's."""


def is_assistant(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is an assistant's."""
    return raw.get("model_type") in TYPES
