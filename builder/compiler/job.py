"""A build's job: its model, target and plans, all checked before anything heavy is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.checkpoint.generation import GenerationIds, read_generation_ids
from mtpbuild.builder.checkpoint.readable import refuse_tokenizer
from mtpbuild.builder.checkpoint.side_files import side_files
from mtpbuild.builder.compiler.fingerprint import fingerprint, hash_files, hash_head_files, identity
from mtpbuild.builder.compiler.plans import (
    check_flags,
    cut_layers,
    find_source,
    make_plans,
    note_context,
)
from mtpbuild.builder.engine import layout
from mtpbuild.builder.engine.staged import count_staged_bytes
from mtpbuild.builder.plan.machine import explain_small_disk
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.recipe import FoundModel
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Watch, ignore
from mtpbuild.builder.targets.target import Target
from mtpbuild.builder.weights.brought import find_brought_files
from mtpbuild.builder.weights.scheme import OWN_TEXT
from mtpbuild.runtime.contract.manifest import hash_file, list_ranks_here
from mtpbuild.runtime.errors import CheckpointError, EngineFileError
from mtpbuild.runtime.text.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from mtpbuild.builder.program.opened_model import OpenedModel


@dataclass(frozen=True)
class Job:
    """A checked request: its model and target, and the plan of each engine by its folder."""

    request: BuildRequest
    source: FoundModel
    config: ModelConfig
    ids: GenerationIds
    target: Target
    plans: dict[Path, Plan]
    brought: Sequence[Path] = ()  # files of the drafter's own weights
    # Builds with equal ones make the same engine; empty until `take_fingerprints`.
    fingerprints: dict[Path, str] = field(default_factory=dict)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks to build; an engine that is not split is its rank 0."""
        rank = self.request.rank
        return range(self.request.ranks.tp) if rank is None else [rank]

    @property
    def calibrates(self) -> bool:
        """Return whether weights are calibrated before they are written."""
        return self.request.scheme is not None and self.request.scheme.calibration is not None

    def is_new(self, out: Path) -> bool:
        """Return whether this engine is built whatever its fingerprint is."""
        manifest = layout.find_engine(out)
        if manifest is None or self.request.force:
            return True
        return manifest.split and not {*self.ranks} <= {*list_ranks_here(out, manifest)}

    def lacking(self, out: Path) -> Sequence[int]:
        """Return the ranks that `out` lacks or has from other inputs; with --force, all ranks.

        Without fingerprints an engine that stands there lacks nothing.
        """
        if self.request.force:
            return self.ranks
        if not self.fingerprints:
            return self.ranks if self.is_new(out) else ()
        return layout.find_missing_ranks(out, self.fingerprints[out], self.ranks)

    def open_model(self, device: str = "cpu") -> "OpenedModel":
        """Open the model, after checking every tensor's name, shape and dtype in the checkpoint.

        device: "meta" if the caller never reads values. Raises CheckpointError, and UsageError or
        BuildError if the target's engines can't hold the model.
        """
        from mtpbuild.builder.program.opened_model import open_model

        plan = next(iter(self.plans.values()))
        model = open_model(
            self.source,
            self.config,
            self.ids,
            plan.style,
            ranks=self.request.ranks,
            layers=self.request.layers,
            drafts=any(plan.nextn for plan in self.plans.values()),
            draft_ids=plan.draft_ids,
            brought=self.brought,
            scheme=plan.scheme,
            device=device,
        )
        for plan in self.plans.values():
            self.target.check_model(model, plan)
        return model

    def explain_small_disk(self, model: "OpenedModel") -> str | None:
        """Return why the disk has no room for the engines that are lacking; None if it has.

        They share one weights file for each rank, unless their programs hold the weights too.
        """
        weights = sum(p.numel() * p.element_size() for p in model.model.parameters())
        shared = apart = there = 0
        for out, plan in self.plans.items():
            count, target = len(self.lacking(out)), self.target
            if plan.style.embeds_weights:
                apart += count * (weights + target.count_loaded_weights(model, plan))
            else:
                shared = max(shared, count * weights)
            there += count_staged_bytes(out, self.request.rank) if count else 0
        return explain_small_disk(next(iter(self.plans)).parent, shared + apart - there)


def prepare(request: BuildRequest) -> Job:
    """Check a request; raise UsageError, CheckpointError or BuildError if it can't be built."""
    target = check_flags(request)
    source, config = find_source(request)
    ids, plans = check_small_files(request, source, config)
    note_context(request, next(iter(plans.values())))
    drafters = dict.fromkeys(plan.drafter for plan in plans.values())
    brought = [path for name in drafters for path in find_brought_files(name, config)]
    return Job(request, source, config, ids, target, plans, brought)


def take_fingerprints(job: Job, watch: Watch = ignore) -> Job:
    """Return the job with its engines' fingerprints, for which all that a build reads is hashed.

    Raises BuildError if a single rank would replace the ranks of another build.
    """
    request, source, scheme = job.request, job.source, job.request.scheme
    checkpoint = hash_files(source.folder, watch)
    if source.mtp is not None:
        checkpoint |= hash_head_files(source.mtp)
    if request.chat_template is not None:
        checkpoint["chat_template"] = hash_file(request.chat_template)
    checkpoint |= {f"drafter/{number}": identity(path) for number, path in enumerate(job.brought)}
    if scheme is not None and scheme.calibration not in (None, OWN_TEXT):
        checkpoint["calibration"] = identity(Path(scheme.calibration))
    prints = {
        out: fingerprint(checkpoint, plan, job.target, request.layers)
        for out, plan in job.plans.items()
    }
    if request.rank is not None:
        for out in job.plans:
            layout.refuse_mixed_ranks(out, prints[out], force=request.force)
    return replace(job, fingerprints=prints)


def check_machine(request: BuildRequest, target: Target, source: FoundModel) -> None:
    """Raise BuildError if this machine can't compile the request's engines; reads no weights.

    source: a model whose folder has a config.json. Raises UsageError as `prepare` does.
    """
    load_compiler(target, [*make_plans(request, *cut_layers(request, source)).values()])


def check_small_files(
    request: BuildRequest, source: FoundModel, config: ModelConfig
) -> tuple[GenerationIds, dict[Path, Plan]]:
    """Return token ids and plans, after all checks that read only the checkpoint's small files."""
    ids = read_generation_ids(source.folder, config)
    refuse_tokenizer(str(source.folder), [path.name for path in source.folder.iterdir()])
    check_texts(source.folder, ids, request.chat_template)
    plans = make_plans(request, source, config)
    for out in plans:
        layout.check_place(out, source.name, force=request.force)
    return ids, plans


def check_texts(folder: Path, ids: GenerationIds, chat_template: Path | None) -> None:
    """Raise CheckpointError for files of the tokenizer that the engine could not load.

    chat_template: a file that takes the place of the checkpoint's templates.
    """
    try:
        tokenizer = read_tokenizer(folder, side_files(folder), ids, chat_template)
        if tokenizer is not None and tokenizer.chat_template is not None:
            tokenizer.chat_template.check()
    except EngineFileError as error:
        why = str(error).removesuffix("; rebuild the engine").removeprefix(f"{folder}/")
        raise CheckpointError(f"{folder}/{why}") from None


def load_compiler(target: Target, plans: Sequence[Plan]) -> None:
    """Import the compiler; raise BuildError if it can't compile these plans on this machine."""
    with target.importing():
        from mtpbuild.builder.program import opened_model  # noqa: F401  # it imports torch

        for plan in plans:
            target.check_machine(plan)
