"""The interface of a model architecture: all that the rest of the builder needs from it."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtpbuild.builder.checkpoint.config import HEAD, HeadConfig, ModelConfig
from mtpbuild.builder.graph.style import Attends
from mtpbuild.builder.models.common.copies import Copy, is_own
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.models.costs import Costs, Split
from mtpbuild.runtime.contract.manifest import FloatType
from mtpbuild.runtime.contract.state import StateSpec, name_layer_state
from mtpbuild.runtime.ranks import Ranks

if TYPE_CHECKING:
    from mtpbuild.builder.gguf.tensors import Architecture
    from mtpbuild.builder.models.common.causal_lm import CausalLM
    from mtpbuild.builder.models.common.plain import PlainLM
    from mtpbuild.builder.models.common.weight import Share, Weight


# Text in the name of a layer's weight -> its kind; the first entry that matches decides.
KINDS = {
    "norm": "router, norms",
    "embed_tokens": "embedding",  # a module's own embedding
    "shared_head.head": "head",
    ".gate.": "router, norms",
    "self_attn": "attention",
    ".experts.": "experts",
    ".shared_expert": "shared experts",
    "mlp.": "dense MLPs",
}


def import_lazily(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports its module when it is first called."""
    return lambda *args: getattr(import_module(module), name)(*args)


@dataclass(frozen=True)
class Recurrent:
    """A recurrent state of a main layer, which the layer has in place of cache rows."""

    name: str  # the layer's name for it
    layer: int
    sizes: Mapping[str, int]  # of one slot, by name
    dtype: FloatType = "float32"

    def spec(self, batch: int) -> StateSpec:
        """Return the spec for all slots; the state can be copied, but not cut back to a token."""
        return StateSpec(
            name=name_layer_state(self.name, self.layer),
            role="recurrent",
            owner=f"layers.{self.layer}",
            dtype=self.dtype,
            sizes={"batch": batch, **self.sizes},
            kept=False,
        )


@dataclass(frozen=True)
class CachedRows:
    """Rows that a main layer has in the cache beside those of its tokens' keys and values."""

    name: str  # the layer's name for them
    layer: int
    width: int
    window: int = 0  # how many of the newest are read; 0: all


@dataclass(frozen=True)
class Family:
    """A model architecture; its functions take the architecture's subclass of ModelConfig.

    Records are made without torch; functions that need it are imported lazily (`import_lazily`).
    """

    name: str  # the architecture that engines report
    architectures: tuple[str, ...]  # names in config.json that select it, as model_type does
    model_type: str
    config: type[ModelConfig]
    make_model: "Callable[[Any, Ranks], CausalLM]"  # parameters without values
    weight_table: "Callable[[Any, Share], list[Weight]]"  # in the order of use
    copies: Callable[[Any], list[Copy]]  # tensors that repeat the embedding or the head
    # The width C of cache rows of each layer, then of each MTP module; 0: no cache rows.
    cache_widths: Callable[[Any, Ranks], list[int]]
    split_sizes: Callable[[Any, Ranks], list[Split]]
    costs: Callable[[Any, Ranks], Costs]
    reference: "Callable[[Any], PlainLM]"
    # The architectures of GGUF files that it reads.
    gguf: "Callable[[], tuple[Architecture, ...]]" = tuple
    # How many rows each layer sees, the last one included; 0: all.
    windows: Callable[[Any], list[int]] = lambda c: [0] * c.num_hidden_layers
    more_rows: Callable[[Any], list[CachedRows]] = lambda c: []  # of main layers
    row_step: Callable[[Any], int] = lambda c: 1  # caches have a multiple of so many rows
    recurrent: Callable[[Any, Ranks], list[Recurrent]] = lambda c, ranks: []  # of main layers
    # Sizes of the parts of a layer's cache row, repeated up to its width. In int8 caches no scale
    # spans two parts. (): no int8 caches.
    cache_sections: Callable[[Any, int], tuple[int, ...]] = lambda c, layer: ()
    attention: Attends = Attends.GROUPED
    # A layer's weights that may be quantised: they multiply hidden states, but are no router's.
    quantisable: re.Pattern[str] = re.compile(r"(self_attn|mlp)\..*_proj")
    own_kinds: Mapping[str, str] = field(default_factory=dict)  # of weights, before `KINDS`
    tables: tuple[str, ...] = ()  # weights of a checkpoint that are embeddings, too
    # The head among a checkpoint's tensors that drafts in place of modules, if there is one, by the
    # trunk's configuration, config.json and the tensors' names.
    find_head: "Callable[[Any, Mapping[str, Any], Collection[str]], HeadConfig | None]" = (
        lambda c, raw, names: None
    )
    # Whether a checkpoint may hold a tensor that no engine reads, by its name.
    leaves_out: Callable[[Any, str], bool] = lambda c, name: False

    def find_kind(self, name: str) -> str:
        """Return the kind of a layer's weight, by its name in the layer, for tables."""
        kinds = {**self.own_kinds, **KINDS}
        return next((kind for text, kind in kinds.items() if text in name), "eh_proj")

    def duplicates(self, c: Any) -> dict[str, str]:
        """Map optional tensors of a checkpoint to the tensors that they repeat, by name."""
        return {copy.name: copy.original for copy in self.copies(c) if not is_own(c, copy)}

    def list_rows(self, c: ModelConfig, ranks: Ranks) -> list[tuple[int, tuple[int, ...]]]:
        """Return the width and the sections of the cache rows of each layer, then of each module.

        Width 0: no cache rows.
        """
        widths = enumerate(self.cache_widths(c, ranks))
        rows = [(width, self.cache_sections(c, layer)) for layer, width in widths]
        if isinstance(head := c.head, GroupedConfig):
            width = 2 * head.num_key_value_heads * head.head_dim
            rows[c.num_hidden_layers :] = [(width, (head.head_dim,))] * head.cached_layers
        return rows

    def place(self, c: ModelConfig, name: str) -> tuple[int, str] | None:
        """Return a tensor's layer and the rest of its name, or None if it is in no layer.

        MTP modules are the layers from `num_hidden_layers` on.
        """
        prefix, own_prefix = c.module_names.prefix, c.module_names.own_prefix
        if name.startswith(f"{HEAD}."):
            return c.num_hidden_layers, name.removeprefix(f"{HEAD}.")
        if prefix and (match := re.match(rf"{re.escape(prefix)}(\d+)\.", name)):
            return c.num_hidden_layers + int(match[1]), name[match.end() :]
        if own_prefix and name.startswith(own_prefix):
            return c.num_hidden_layers, name.removeprefix(own_prefix)
        if match := re.match(r"model\.layers\.(\d+)\.", name):
            return int(match[1]), name[match.end() :]
        return None

    def may_be_quantised(self, c: ModelConfig, name: str) -> int | None:
        """Return the layer of a weight that may be quantised, or None."""
        if (place := self.place(c, name)) is None or not place[1].endswith(".weight"):
            return None
        layer, weight = place
        weight = re.sub(r"^layers\.\d+\.", "", weight)  # of a head with several
        return layer if self.quantisable.fullmatch(weight.removesuffix(".weight")) else None

    def is_module_input_proj(self, c: ModelConfig, name: str) -> bool:
        """Return whether a weight projects an MTP module's inputs; only drafts depend on it."""
        place = self.place(c, name)
        names = c.head.input_projs if c.head else (c.module_names.input_proj,)
        return (
            place is not None
            and place[0] >= c.num_hidden_layers
            and place[1].removesuffix(".weight") in names
        )
