"""A Family holds all that is special to a model architecture; other code asks it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtpbuild.builder.models.common.copies import Copy, repeated
from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.builder.targets.style import Attends
from mtpbuild.runtime.contract.manifest import FloatType
from mtpbuild.runtime.contract.state import StateSpec, layer_state
from mtpbuild.runtime.ranks import Ranks

if TYPE_CHECKING:
    from mtpbuild.builder.models.common.causal_lm import CausalLM
    from mtpbuild.builder.models.common.plain import Reference
    from mtpbuild.builder.weights.made import Share, Weight


# The small projections of a delta rule, whose results are exponents, stay as they are, and so do
# the weights of an indexer's heads.
PRODUCT = re.compile(
    r"((self_attn|mlp)\.(?!indexer).*_proj(_with_mqa)?|self_attn\.indexer\.(wq_b|wk)"
    r"|linear_attn\.(in_proj_(qkvz?|z)|out_proj))\.weight"
)

# What an MTP module multiplies an embedding and a hidden state by; each family names it its way.
JOIN = re.compile(r"(eh_proj|input_proj|fc)\.weight")


def late(module: str, name: str) -> Callable[..., Any]:
    """Returns a function that imports its module when it is first called."""
    return lambda *args: getattr(import_module(module), name)(*args)


@dataclass(frozen=True)
class Split:
    """Is a size of the model that ranks split into equal parts."""

    name: str
    size: int
    parts: int
    weights: str = ""  # the class of weights it cuts, whose format's blocks must stay whole


@dataclass(frozen=True)
class Costs:
    """Holds the costs of a step on one rank that only the family can compute."""

    row_operations: float  # operations of one token on one cached row of one layer
    activations: float  # most values of a token that exist at once
    experts: int = 0  # routed experts of a layer
    chosen: int = 0  # routed experts that each token chooses
    scores: float = 0.0  # values that a prompt's attention holds of each token and row it sees
    expanded: float = 0.0  # and of each row
    most_rows: int | None = None  # rows that a token attends to at most; None: all
    attended: int = 0  # values of a row that attention reads; 0: all
    scoring: float = 0.0  # operations of one token on the other ones, by which rows are chosen

    def rows(self, context: int, tokens: int) -> int:
        """Returns how many of a context's rows so many tokens attend to at most."""
        return context if self.most_rows is None else min(context, tokens * self.most_rows)


@dataclass(frozen=True)
class Recurrent:
    """A state of a main layer that its tokens advance, in place of rows that it would keep."""

    name: str  # as its layer calls it
    layer: int
    sizes: Mapping[str, int]  # of one slot, by name
    dtype: FloatType = "float32"

    def spec(self, batch: int) -> StateSpec:
        """The state of all slots, which can't be cut at an earlier token, but copied at one."""
        return StateSpec(
            name=layer_state(self.name, self.layer),
            role="recurrent",
            owner=f"layers.{self.layer}",
            dtype=self.dtype,
            sizes={"batch": batch, **self.sizes},
            kept=False,
        )


@dataclass(frozen=True)
class Family:
    """Is one model architecture; its functions take its own subclass of ModelConfig.

    The record needs no torch: functions that do are imported late (`late`).
    """

    name: str  # the architecture that engines report
    architectures: tuple[str, ...]  # names in config.json that select it, as model_type does
    model_type: str
    config: type[ModelConfig]
    parse_config: Callable[[Mapping[str, Any]], ModelConfig]
    make_model: "Callable[[Any, Ranks], CausalLM]"  # parameters without values
    weight_table: "Callable[[Any, Share], list[Weight]]"  # in the order of use
    copies: Callable[[Any], list[Copy]]  # tensors that repeat the embedding or the head
    # C of each layer, then of each MTP module; 0: a layer that keeps no rows.
    cache_specs: Callable[[Any, Ranks], list[int]]
    split_sizes: Callable[[Any, Ranks], list[Split]]
    costs: Callable[[Any, Ranks], Costs]
    reference: "Callable[[Any], Reference]"
    recurrent: Callable[[Any, Ranks], list[Recurrent]] = lambda c, ranks: []  # of main layers
    modules: str = ""  # prefix of MTP modules counted from 0; without one, modules are layers
    modules_key: str = "num_nextn_predict_layers"  # their number in config.json
    beside_modules: str = ""  # prefix of what a module has beside its layer, if there is one
    attention: Attends = Attends.GROUPED

    def duplicates(self, c: Any) -> dict[str, str]:
        """Maps tensors that a checkpoint may have beside the table's to those that they repeat."""
        return repeated(c, self.copies(c))

    def module_name(self, c: ModelConfig, j: int) -> str:
        """Returns a checkpoint's name of MTP module j, from 0."""
        return f"{self.modules}{j}" if self.modules else f"model.layers.{c.num_hidden_layers + j}"

    def place(self, c: ModelConfig, name: str) -> tuple[int, str] | None:
        """Returns a tensor's layer and the rest of its name, or None if it is in no layer.

        MTP modules are the layers from `num_hidden_layers` on.
        """
        if self.modules and (found := re.match(rf"{re.escape(self.modules)}(\d+)\.", name)):
            return c.num_hidden_layers + int(found[1]), name[found.end() :]
        if self.beside_modules and name.startswith(self.beside_modules):
            return c.num_hidden_layers, name.removeprefix(self.beside_modules)
        if found := re.match(r"model\.layers\.(\d+)\.", name):
            return int(found[1]), name[found.end() :]
        return None

    def may_be_quantised(self, c: ModelConfig, name: str) -> int | None:
        """Returns the layer of a weight that may be quantised, or None.

        These are the weights that multiply a layer's hidden states, except the router's.
        """
        place = self.place(c, name)
        return place[0] if place is not None and PRODUCT.fullmatch(place[1]) else None

    def joins(self, c: ModelConfig, name: str) -> bool:
        """Tells whether a weight joins what an MTP module is given: drafts alone depend on it."""
        place = self.place(c, name)
        if place is None or place[0] < c.num_hidden_layers:
            return False
        return JOIN.fullmatch(place[1]) is not None
