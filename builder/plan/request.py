"""The request that `mtpbuild build` passes to the compiler."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.flags import BuildFlags
from mtpbuild.builder.plan.plan import DrafterName, Nextn
from mtpbuild.builder.weights.scheme import Scheme
from mtpbuild.runtime.contract.target_options import OptionValue
from mtpbuild.runtime.ranks import Ranks


@dataclass(frozen=True)
class BuildRequest(BuildFlags):
    """A request of `mtpbuild build`: the model, the engines' flags and the target's."""

    model: str
    nextn: tuple[Nextn, ...] | None = None  # None: the checkpoint's number of MTP modules
    drafter: DrafterName | None = None
    target: str = "onnxruntime"
    ranks: Ranks = field(default_factory=Ranks)
    layers: LayersSlice | None = None
    scheme: Scheme | None = None  # how to quantise weights; None: as the checkpoint has them
    acceptance_rules: tuple[str, ...] = ()  # names of rules from other packages
    options: Mapping[str, OptionValue] = field(default_factory=dict)  # the target's flags, as given

    @property
    def calibration(self) -> str | None:
        """The text that int4 weights are calibrated with; None if they are not."""
        return None if self.scheme is None else self.scheme.calibration
