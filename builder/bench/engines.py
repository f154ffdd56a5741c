"""Builds of a benchmark's engines; the user's own engines are never overwritten."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtpbuild.builder.build import build
from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checks import in_range
from mtpbuild.builder.engine import layout
from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.builder.plan import DrafterName, Nextn, choose_drafter, in_order
from mtpbuild.builder.prepare import DEFAULT_MAX_SEQ_LEN, find_source
from mtpbuild.builder.recipe import FoundModel, default_target
from mtpbuild.builder.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.targets import load_target
from mtpbuild.builder.targets.target import Target
from mtpbuild.builder.weights.scheme import AS_STORED, Scheme
from mtpbuild.runtime.contract.manifest import MAX_BATCH
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.targets import find_target

ENGINES = Path("engines")
PRIVATE = ENGINES / ".bench"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The engines that a benchmark needs; nextn 0 is always among them.

    drafter: of every nextn but "auto", which always uses MTP Eagle. target: None stands for the
    recipe's. options: the target's flags of `mtpbuild build`.
    """

    model: str
    nextn: tuple[Nextn, ...]
    drafter: DrafterName | None = None
    concurrency: tuple[int, ...] = (1,)
    layers: LayersSlice | None = None
    scheme: Scheme | None = None
    revision: str | None = None
    target: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nextn", in_order([0, *self.nextn]))
        object.__setattr__(self, "concurrency", tuple(sorted(set(self.concurrency))))
        for size in self.concurrency:
            in_range(1, size, MAX_BATCH, "--concurrency")
            if self.max_batch % size:
                raise UsageError(
                    f"--concurrency {size} does not divide {self.max_batch}: groups of the largest "
                    "are split for the others, so that all run the same requests"
                )

    @property
    def max_batch(self) -> int:
        return self.concurrency[-1]

    @property
    def built_for(self) -> str:
        """Return the target's name."""
        return self.target or default_target(self.model)

    @property
    def of_usual_target(self) -> bool:
        """Return whether the target is the one that `mtpbuild build` chooses by default."""
        return load_target(self.built_for) is load_target(default_target(self.model))

    def drafter_of(self, nextn: Nextn) -> DrafterName | None:
        return None if nextn == "auto" else self.drafter


@dataclass(frozen=True, slots=True)
class Built:
    """The engine directories of one nextn; the verifier has the same nextn and drafts nothing."""

    nextn: Nextn
    folder: Path
    verifier: Path | None


def build_engines(wanted: Wanted, stages: Stages) -> list[Built]:
    """Build an engine and a verifier per nextn, unless they exist."""
    common = BuildRequest(
        wanted.model,
        max_batch=wanted.max_batch,
        layers=wanted.layers,
        scheme=wanted.scheme,
        revision=wanted.revision,
        target=wanted.built_for,
        options=wanted.options,
    )
    source, config = find_source(common)
    for nextn in wanted.nextn:  # fail before anything is built
        choose_drafter(config, nextn, wanted.drafter_of(nextn))

    def made(nextn: Nextn, drafter: DrafterName | None, out: Path) -> Path:
        stages.watch(f"building {out}")
        build(replace(common, nextn=(nextn,), drafter=drafter, out=out), stages)
        return out

    built = []
    for nextn in wanted.nextn:
        usual = place(source, config, nextn, wanted)
        folder, verifier = made(nextn, wanted.drafter_of(nextn), usual), None
        if nextn not in (0, "auto"):
            verifier = made(nextn, "none", _private(source, nextn, "none", wanted))
        built.append(Built(nextn, folder, verifier))
    return built


def place(source: FoundModel, config: ModelConfig, nextn: Nextn, wanted: Wanted) -> Path:
    """Choose an engine's folder: engines/NAME_nK for a plain `mtpbuild build`, or a private one.

    The private folder is also used if engines/NAME_nK has another engine.
    """
    usual, drafter = ENGINES / f"{source.engine}_n{nextn}", wanted.drafter_of(nextn)
    flags = wanted.max_batch > 1 or drafter or wanted.scheme or wanted.options
    target = load_target(wanted.built_for)
    plain = wanted.of_usual_target and not flags
    if plain and (not usual.exists() or _is_plain(usual, source, config, nextn, target)):
        return usual
    return _private(source, nextn, drafter or "default", wanted)


def _is_plain(
    folder: Path, source: FoundModel, config: ModelConfig, nextn: Nextn, target: Target
) -> bool:
    """Return whether an engine is what `mtpbuild build` makes of the model without other flags."""
    manifest = layout.existing(folder)
    if manifest is None or manifest.model.name != source.name:
        return False
    if load_target(manifest.target.name) is not target:
        return False
    there, plain = manifest.build, BuildRequest(source.name)
    options = target.Options(**find_target(target.name).build_flags(manifest))
    length = min(config.max_position_embeddings, DEFAULT_MAX_SEQ_LEN)
    return (
        (there.drafter, there.max_batch) == (choose_drafter(config, nextn, None), plain.max_batch)
        and (there.max_seq_len, there.prefill_chunk) == (length, plain.prefill_chunk)
        and (there.quantised_to, there.draft_vocab) == (None, None)
        and options == target.Options()
    )


def _private(source: FoundModel, nextn: Nextn, drafter: str, wanted: Wanted) -> Path:
    scheme = wanted.scheme
    kind = "" if scheme is None else f"_{scheme.main}_head_{scheme.head or AS_STORED}"
    if not wanted.of_usual_target:
        kind += f"_{wanted.built_for}"
    kind += "".join(f"_{name}-{value}" for name, value in wanted.options.items())
    return PRIVATE / f"{source.engine}_n{nextn}_{drafter}_b{wanted.max_batch}{kind}"
