"""MiMo-7B's `config.json`, and the costs of its sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtpbuild.builder.checkpoint.config import ModuleInputs, Reader, fixed, integer
from mtpbuild.builder.models.common.grouped_config import (
    GroupedConfig,
    count_grouped_costs,
    list_attention_splits,
    read_head_sizes,
)
from mtpbuild.builder.models.common.moe_config import list_module_splits
from mtpbuild.builder.models.costs import Costs, Split
from mtpbuild.runtime.ranks import Ranks

PREFIX = "model.mtp_layers."

# A module's input is [hidden ; embedding], with hidden states from before the final norm, as in
# vLLM (Xiaomi's code, PR #17433) and exllamav3 (PR #238: 88 % of first drafts accepted). SGLang
# passes normalised hidden states. No checkpoint has more than one module, so a second draft's input
# is undefined; like exllamav3, we use the state before `final_layernorm`.
RULES = ModuleInputs(hidden_first=True, trunk_normed=False, recycles_normed=False)


@dataclass(frozen=True, kw_only=True)
class MimoConfig(GroupedConfig):
    """Qwen2's values: queries, keys and values have biases, and whole heads rotate."""

    intermediate_size: int = integer()
    mtp: ModuleInputs = fixed(RULES)


def parse_config(raw: Mapping[str, Any]) -> MimoConfig:
    """Normalise a `config.json`; raise CheckpointError."""
    read = Reader(raw)
    read.only(hidden_act="silu", use_sliding_window=False)
    config = read.fill(MimoConfig, **read_head_sizes(read))
    config.check_heads()
    return config


def split_sizes(c: MimoConfig, ranks: Ranks) -> list[Split]:
    return [
        *list_attention_splits(c, ranks),
        Split("vocab_size", c.vocab_size, ranks.parts),
        Split("intermediate_size", c.intermediate_size, ranks.parts, "dense MLPs"),
        *list_module_splits(c, ranks),
    ]


def costs(c: MimoConfig, ranks: Ranks) -> Costs:
    return count_grouped_costs(c, ranks, 3 * c.intermediate_size / ranks.parts)
