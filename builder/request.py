"""The request that `mtpbuild build` makes of the compiler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.plan import DrafterName, Nextn
from mtpbuild.builder.weights.scheme import Scheme
from mtpbuild.runtime.ranks import Ranks


@dataclass(frozen=True)
class BuildRequest:
    """Holds the flags of `mtpbuild build`."""

    model: str
    nextn: tuple[Nextn, ...] | None = None  # None: the checkpoint's number of MTP modules
    drafter: DrafterName | None = None
    max_batch: int = 1
    max_seq_len: int | None = None
    prefill_chunk: int = 256
    target: str = "onnxruntime"
    out: Path | None = None
    force: bool = False
    checkpoint: Path | None = None  # the folder of a recipe's or repository's weights
    ranks: Ranks = field(default_factory=Ranks)
    rank: int | None = None  # the only one to build; None: all
    layers: LayersSlice | None = None
    scheme: Scheme | None = None  # how to quantise weights; None: as the checkpoint has them
    draft_vocab: str | None = None  # a number of tokens, or a file of token ids
    acceptance_rules: tuple[str, ...] = ()  # names of rules from other packages
    dry_run: bool = False  # nothing is compiled
    options: Mapping[str, Any] = field(default_factory=dict)  # the target's flags, as given
    revision: str | None = None  # branch, tag or commit of the repository
