"""A family is what a model architecture brings; code that depends on one asks the family."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtpbuild.builder.models.common.copies import Copy, repeated
from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.runtime.ranks import Ranks

if TYPE_CHECKING:
    from mtpbuild.builder.models.common.causal_lm import CausalLM
    from mtpbuild.builder.models.common.plain import Reference
    from mtpbuild.builder.models.common.weights import Share, Weight


PRODUCT = re.compile(r"(self_attn|mlp)\..*_proj(_with_mqa)?\.weight")


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
    parse_config: Callable[[Mapping[str, Any]], ModelConfig]
    make_model: "Callable[[Any, Ranks], CausalLM]"  # parameters without values
    weight_table: "Callable[[Any, Share], list[Weight]]"  # in the order of use
    copies: Callable[[Any], list[Copy]]  # tensors that repeat the embedding or the head
    cache_specs: Callable[[Any, Ranks], list[int]]  # C of each layer, then of each MTP module
    split_sizes: Callable[[Any, Ranks], list[Split]]
    costs: Callable[[Any, Ranks], Costs]
    reference: "Callable[[Any], Reference]"
    modules: str = ""  # prefix of MTP modules that are counted from 0; else they are layers
    gpu_kernels: bool = False  # targets for GPUs have kernels for its attention

    def duplicates(self, c: Any) -> dict[str, str]:
        """Tensors that the checkpoint may have beside the table's -> what they repeat."""
        return repeated(c, self.copies(c))

    def module_name(self, c: ModelConfig, j: int) -> str:
        """What a checkpoint calls MTP module j, from 0."""
        return f"{self.modules}{j}" if self.modules else f"model.layers.{c.num_hidden_layers + j}"

    def place(self, c: ModelConfig, name: str) -> tuple[int, str] | None:
        """The layer of a checkpoint's tensor and what follows in its name; None: of no layer.

        MTP modules are the layers from `num_hidden_layers` on.
        """
        if self.modules and (found := re.match(rf"{re.escape(self.modules)}(\d+)\.", name)):
            return c.num_hidden_layers + int(found[1]), name[found.end() :]
        if found := re.match(r"model\.layers\.(\d+)\.", name):
            return int(found[1]), name[found.end() :]
        return None

    def may_be_quantised(self, c: ModelConfig, name: str) -> int | None:
        """The layer of a weight that is a product with the hidden state, but for the router's.

        None: a weight that stays as it is.
        """
        place = self.place(c, name)
        return place[0] if place is not None and PRODUCT.fullmatch(place[1]) else None
