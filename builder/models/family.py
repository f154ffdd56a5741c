"""A family is what a model architecture brings; code that depends on one asks the family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.runtime.ranks import Ranks

if TYPE_CHECKING:
    from mtpbuild.builder.models.common.causal_lm import CausalLM
    from mtpbuild.builder.models.common.reference import Reference
    from mtpbuild.builder.models.common.weights import Share, Weight


def late(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when it is called for the first time."""
    return lambda *args: getattr(import_module(module), name)(*args)


@dataclass(frozen=True)
class Split:
    """A size of the model that ranks split into equal parts."""

    name: str
    size: int
    parts: int
    weights: str = ""  # the class of weights that it cuts: their format's blocks stay whole


@dataclass(frozen=True)
class Costs:
    """The arithmetic of a step that only the family knows, on one rank."""

    row_operations: float  # of one token over one cached row of one layer
    activations: float  # values of a token that exist at once, where they are most
    experts: int = 0  # that a layer routes to
    chosen: int = 0  # of them for each token


@dataclass(frozen=True)
class Family:
    """One model architecture. Functions get the family's own kind of configuration.

    A record needs no torch: what does need it is named by `late`.
    """

    name: str  # the architecture that engines report
    architectures: tuple[str, ...]  # that config.json may say, beside model_type
    model_type: str
    config: type[ModelConfig]
    quantisable: str  # pattern of the weights that may be quantised; group 1 is the layer
    parse_config: Callable[[Mapping[str, Any]], ModelConfig]
    make_model: "Callable[[Any, Ranks], CausalLM]"  # parameters without values
    weight_table: "Callable[[Any, Share], list[Weight]]"  # in the order of use
    duplicates: Callable[[Any], dict[str, str]]  # tensors of MTP layers -> what they repeat
    cache_specs: Callable[[Any, Ranks], list[int]]  # C of each layer, then of each MTP module
    split_sizes: Callable[[Any, Ranks], list[Split]]
    costs: Callable[[Any, Ranks], Costs]
    reference: "Callable[[Any], Reference]"
    # Pattern of embedding and head, by the names that `duplicates` gives to their copies.
    ends: str = r"(model\.embed_tokens|lm_head)\.weight"
