"""The `config.json` of models with DeepSeek's sparse attention, and the costs of their sizes."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

from mtpbuild.builder.checkpoint.config import COUNT_LIMIT, ModuleInputs, Reader, flag, integer
from mtpbuild.builder.models.costs import Costs
from mtpbuild.builder.models.deepseek_v3 import config as deepseek_v3
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.runtime.errors import CheckpointError, UsageError
from mtpbuild.runtime.ranks import Ranks

FULL, SHARED = "full", "shared"  # names in `indexer_types`
LETTERS = {"F": FULL, "S": SHARED}  # in `index_topk_pattern`


def make_mtp_rules(read: Reader, key: str) -> ModuleInputs:
    return ModuleInputs(shares_choice=read.flag("index_share_for_mtp_iteration", False))


@dataclass(frozen=True, kw_only=True)
class DeepseekV32Config(DeepseekV3Config):
    """DeepSeek-V3's values, and those of the indexer that chooses rows for each token."""

    index_topk: int = integer()
    index_n_heads: int = integer()
    index_head_dim: int = integer()
    indexer_rope_interleave: bool = flag(False)
    # Whether each main layer has an indexer. A layer without one reuses the choice of the nearest
    # layer before it that has one.
    indexers: tuple[bool, ...] = field(metadata={"read": lambda read, key: indexers(read)})
    mtp: ModuleInputs = field(metadata={"read": make_mtp_rules})

    def check(self) -> None:
        super().check()
        if self.q_lora_rank is None:
            raise CheckpointError("q_lora_rank is missing: the indexer's queries are made from it")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise CheckpointError(
                f"index_head_dim {self.index_head_dim} is below qk_rope_head_dim "
                f"{self.qk_rope_head_dim}, of which its rotary part is"
            )

    def has_indexer(self, layer: int) -> bool:
        """Return whether a layer chooses rows itself, as all MTP modules do."""
        return layer >= self.num_hidden_layers or self.indexers[layer]

    def sliced(self, first: int, count: int) -> Self:
        kept = self.indexers[first : first + count]
        if not kept[0]:
            raise UsageError(
                f"--layers {first}-{first + count - 1} begins with a layer that takes an earlier "
                f"one's choice of rows: begin with {self.chooser(first)}"
            )
        return replace(super().sliced(first, count), indexers=kept)

    def chooser(self, layer: int) -> int:
        """Return the layer whose choice of rows a main layer attends to."""
        return max(i for i in range(layer + 1) if self.indexers[i])


def indexers(read: Reader) -> tuple[bool, ...]:
    """Read which main layers have an indexer.

    `indexer_types` has a name for each layer, or `index_topk_pattern` a letter. Without both, every
    `index_topk_freq`-th layer has one after the first ones, which all do.
    """
    count = read.integer("num_hidden_layers", 1, most=COUNT_LIMIT)
    every = read.integer("index_topk_freq", 1, 1)
    offset = read.integer("index_skip_topk_offset", 0, 2)

    def are_names(value: Any) -> bool:
        return isinstance(value, list) and set(map(str, value)) <= {FULL, SHARED}

    def is_pattern(value: Any) -> bool:
        return are_names(value) or (isinstance(value, str) and set(value) <= LETTERS.keys())

    regular = [FULL if max(i - offset + 1, 0) % every == 0 else SHARED for i in range(count)]
    pattern = read.get("index_topk_pattern", regular, is_pattern, "letters F and S")
    names = [LETTERS.get(entry, entry) for entry in pattern]
    names = read.get("indexer_types", names, are_names, f"a list of names, {FULL} or {SHARED}")
    if len(names) != count or names[0] != FULL:
        raise CheckpointError(
            f"indexer_types (index_topk_pattern) must have a name for each of {count} layers, the "
            f"first one {FULL}, not {len(names)} from {names[:1]} on"
        )
    return tuple(name == FULL for name in names)


def cache_widths(c: DeepseekV32Config, ranks: Ranks) -> list[int]:
    """Return the width of each layer's cache rows: latent, rotary key, the indexer's key if any."""
    widths = deepseek_v3.cache_widths(c, ranks)
    return [w + c.index_head_dim * c.has_indexer(i) for i, w in enumerate(widths)]


def costs(c: DeepseekV32Config, ranks: Ranks) -> Costs:
    """Return a step's costs: the indexer scores all rows, and attention reads the chosen ones."""
    return replace(
        deepseek_v3.costs(c, ranks),
        most_rows=c.index_topk,
        attended=c.cache_dim,
        scoring=2.0 * c.index_n_heads * c.index_head_dim,
    )
