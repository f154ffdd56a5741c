"""MiMo-7B: Qwen2's dense trunk, and an MTP module whose tensors have names of their own."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mtpbuild.builder.checkpoint.config import ModuleInputs, ModuleNames, fixed
from mtpbuild.builder.models.common.copies import list_tied_head
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.models.common.grouped_family import GROUPED

# A module's input is [hidden ; embedding], with hidden states from before the final norm, as in
# vLLM (Xiaomi's code, PR #17433) and exllamav3 (PR #238: 88 % of first drafts accepted). SGLang
# passes normalised hidden states. No checkpoint has more than one module, so a second draft's input
# is undefined; like exllamav3, we use the state before `final_layernorm`.
RULES = ModuleInputs(hidden_first=True, trunk_normed=False, recycles_normed=False)


@dataclass(frozen=True, kw_only=True)
class MimoConfig(GroupedConfig):
    """Qwen2's values: queries, keys and values have biases, and whole heads rotate."""

    module_names = ModuleNames(
        prefix="model.mtp_layers.",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        input_proj="input_proj",
        head_norm="final_layernorm",
    )

    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "use_sliding_window": False}

    mtp: ModuleInputs = fixed(RULES)


FAMILY = replace(
    GROUPED,
    name="MiMoForCausalLM",
    architectures=("MiMoForCausalLM",),
    model_type="mimo",
    config=MimoConfig,
    copies=list_tied_head,
)
