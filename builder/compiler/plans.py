"""Turn a request into the plans of its engines, with every refusal that needs no weights."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.checkpoint.readable import name_stored_format, read_quantisation
from mtpbuild.builder.compiler.fingerprint import (
    fingerprint,
    hash_files,
    hash_head_files,
    hash_samples,
)
from mtpbuild.builder.compiler.flag_checks import (
    check_flags,
    check_rules,
    check_style,
    check_target,
    choose_draft_ids,
    choose_nextns,
    name_suffix,
)
from mtpbuild.builder.compiler.source import ModelSource, find_source
from mtpbuild.builder.engine import layout
from mtpbuild.builder.engine.staged import count_staged_bytes
from mtpbuild.builder.models.ranks import check_ranks
from mtpbuild.builder.plan.context import USUAL, choose_context, count_weights_bytes
from mtpbuild.builder.plan.machine import THIS_MACHINE, Room, explain_small_disk, measure_memory
from mtpbuild.builder.plan.plan import (
    Nextn,
    Plan,
    choose_drafter,
    count_drafts,
    count_state_bytes,
    make_state_specs,
)
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Watch, ignore
from mtpbuild.builder.targets.target import Target
from mtpbuild.builder.weights.bit_budget import spend_bits
from mtpbuild.builder.weights.drafter_weights import find_brought_files
from mtpbuild.builder.weights.scheme import OWN_TEXT, SCHEMES
from mtpbuild.runtime.checks import in_range
from mtpbuild.runtime.contract.manifest import (
    MAX_BATCH,
    MAX_CHUNK,
    MAX_SEQ_LEN,
    hash_file,
    list_ranks_here,
)

if TYPE_CHECKING:
    from mtpbuild.builder.program.opened_model import OpenedModel

# Products of a layer that tell in which formats a checkpoint is.
TELLING_PRODUCTS = ("self_attn.o_proj", "mlp.down_proj", "mlp.experts.0.down_proj")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plans:
    """A checked request: its target and model, and the plan of each engine by its folder."""

    request: BuildRequest
    target: Target
    source: ModelSource
    engines: Mapping[Path, Plan]
    brought: Sequence[Path] = ()  # files of the drafter's own weights
    # Builds with equal ones make the same engine; empty until `take_fingerprints`.
    fingerprints: Mapping[Path, str] = field(default_factory=dict)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks to build; an engine that is not split is its rank 0."""
        rank = self.request.rank
        return range(self.request.ranks.tp) if rank is None else [rank]

    @property
    def first(self) -> Path:
        """The folder of the first engine, beside which a calibration is resumed."""
        return next(iter(self.engines))

    def is_new(self, out: Path) -> bool:
        """Return whether this engine is built whatever its fingerprint is."""
        manifest = layout.find_engine(out)
        if manifest is None or self.request.force:
            return True
        return manifest.split and not {*self.ranks} <= {*list_ranks_here(out, manifest)}

    def fetch(self, room: Room = THIS_MACHINE) -> "Plans":
        """Fetch the model's weights unless they are here, if this machine can compile its engines.

        room: measures the machine's disks and memory.
        """
        if self.source.remote is None:
            return self
        self.load_compiler()
        return replace(self, source=self.source.fetch(self.request, self.engines, room))

    def load_compiler(self) -> None:
        """Import the compiler; raise BuildError if it can't compile the plans on this machine."""
        with self.target.importing():
            from mtpbuild.builder.program import opened_model  # noqa: F401  # it imports torch

            for plan in self.engines.values():
                self.target.check_machine(plan)

    def open_model(self, device: str = "cpu") -> "OpenedModel":
        """Open the model, after checking every tensor's name, shape and dtype in the checkpoint.

        device: "meta" if the caller never reads values. Raises CheckpointError, and UsageError or
        BuildError if the target's engines can't hold the model.
        """
        from mtpbuild.builder.program.opened_model import open_model

        plan = self.engines[self.first]
        model = open_model(
            self.source,
            self.source.config,
            self.source.ids,
            plan.style,
            ranks=self.request.ranks,
            layers=self.request.layers,
            drafts=any(plan.nextn for plan in self.engines.values()),
            draft_ids=plan.draft_ids,
            brought=self.brought,
            scheme=plan.scheme,
            device=device,
        )
        for plan in self.engines.values():
            self.target.check_model(model, plan)
        return model

    def take_fingerprints(self, watch: Watch = ignore) -> "Plans":
        """Return the plans with fingerprints, for which all that a build reads is hashed.

        Raises BuildError if a single rank would replace the ranks of another build.
        """
        request, source, text = self.request, self.source, self.request.calibration
        checkpoint = hash_files(source.folder, watch)
        if source.mtp is not None:
            checkpoint |= hash_head_files(source.mtp)
        if source.chat_template is not None:
            checkpoint["chat_template"] = hash_file(source.chat_template)
        checkpoint |= {f"drafter/{i}": hash_samples(path) for i, path in enumerate(self.brought)}
        if text not in (None, OWN_TEXT):
            checkpoint["calibration"] = hash_samples(Path(text))
        prints = {
            out: fingerprint(checkpoint, plan, self.target, request.layers)
            for out, plan in self.engines.items()
        }
        if request.rank is not None:
            for out in self.engines:
                layout.refuse_mixed_ranks(out, prints[out], force=request.force)
        return replace(self, fingerprints=prints)

    def missing(self) -> dict[Path, Sequence[int]]:
        """Return the ranks to build of each engine: those that it lacks or has from other inputs.

        With --force these are all. Without fingerprints an engine that is there lacks nothing.
        """
        ranks = dict[Path, Sequence[int]]()
        for out in self.engines:
            if self.request.force or (not self.fingerprints and self.is_new(out)):
                ranks[out] = self.ranks
            elif self.fingerprints:
                ranks[out] = layout.find_missing_ranks(out, self.fingerprints[out], self.ranks)
        return {out: missing for out, missing in ranks.items() if missing}

    def explain_small_disk(self, model: "OpenedModel") -> str | None:
        """Return why the disk has no room for the engines that are missing; None if it has.

        They share one weights file for each rank, unless their programs hold the weights too.
        """
        weights = model.weight_bytes
        shared = apart = already = 0
        for out, ranks in self.missing().items():
            plan = self.engines[out]
            if plan.style.embeds_weights:
                apart += len(ranks) * (weights + self.target.count_loaded_weights(model, plan))
            else:
                shared = max(shared, len(ranks) * weights)
            already += count_staged_bytes(out, self.request.rank)
        return explain_small_disk(self.first.parent, shared + apart - already)


def plan_engines(request: BuildRequest, *, may_fetch: bool = False) -> Plans:
    """Check a request, and plan its engines; read no weights.

    may_fetch: whether the small files of a model that is not here may be downloaded. Raises
    UsageError, CheckpointError, BuildError, MissingWeightsError or DownloadError.
    """
    target = check_flags(request)
    return make_plans(request, target, find_source(request, may_fetch=may_fetch))


def make_plans(request: BuildRequest, target: Target, source: ModelSource) -> Plans:
    """Return the plans of a request's engines.

    Raises UsageError, CheckpointError or BuildError for all that the model's small files tell.
    """
    config, folder, style = source.config, source.folder, target.style
    nextns = choose_nextns(config, request, folder)
    check_target(target, request, nextns)
    check_style(target, request, config, style)
    check_rules(target, request, style)
    check_ranks(config, request.ranks)
    engines = plan_each(request, target, source, nextns)
    largest = max(engines.values(), key=lambda plan: plan.nextn)  # takes the most memory
    check_formats(target, request, folder, largest)
    # Engines with our kernels take memory only for the rows of their caches that are in use.
    if request.max_seq_len is None and style.packs_weights:
        length = find_longest_context(largest, folder)
        engines = {out: replace(plan, max_seq_len=length) for out, plan in engines.items()}
    for out in engines:
        layout.check_place(out, source.name, force=request.force)
    note_context(request, next(iter(engines.values())))
    drafters = dict.fromkeys(plan.drafter for plan in engines.values())
    brought = [path for name in drafters for path in find_brought_files(name, config)]
    return Plans(request, target, source, engines, brought)


def plan_each(
    request: BuildRequest, target: Target, source: ModelSource, nextns: tuple[Nextn, ...]
) -> dict[Path, Plan]:
    """Return a plan for each number of drafts, by its engine's folder."""
    config, style, length = source.config, target.style, request.max_seq_len
    capabilities = target.compute_capabilities(request)
    length = min(limit_context(config), USUAL) if length is None else length
    ids = choose_draft_ids(request, nextns, source.folder, config)
    suffix = name_suffix(request, style, ids)
    scheme = spend_bits(request.scheme, config)
    engines = dict[Path, Plan]()
    for asked in nextns:
        nextn = count_drafts(config, asked)
        out = request.out or Path("engines")
        if request.out is None or len(nextns) > 1:
            out = out / f"{source.engine}_n{asked}{suffix}"
        engines[out] = Plan(
            config=config,
            nextn=nextn,
            drafter=choose_drafter(config, asked, request.drafter),
            max_batch=in_range(request.max_batch, 1, MAX_BATCH, "--max-batch"),
            max_seq_len=in_range(length, nextn + 4, MAX_SEQ_LEN, "--max-seq-len"),
            prefill_chunk=in_range(request.prefill_chunk, 1, MAX_CHUNK, "--prefill-chunk"),
            style=style,
            ranks=request.ranks,
            compute_capabilities=capabilities,
            adaptive=asked == "auto",
            scheme=scheme,
            rules=request.acceptance_rules,
            score=request.score,
            draft_ids=ids,  # nextn 0 too: engines of one build share their weights
        )
    return engines


def check_formats(target: Target, request: BuildRequest, folder: Path, plan: Plan) -> None:
    """Raise BuildError if the GPUs can't compute with the formats of --weights or checkpoint."""
    settings, last = read_quantisation(folder), plan.config.num_hidden_layers - 1
    products = (f"model.layers.{last}.{product}.weight" for product in TELLING_PRODUCTS)
    stored = {name_stored_format(settings, product) for product in products}
    for scheme in [request.scheme] if request.scheme else [SCHEMES[name] for name in stored]:
        target.check_formats((scheme.main, scheme.mtp, scheme.head), plan)


def limit_context(config: ModelConfig) -> int:
    """Return the longest context by the checkpoint's configuration."""
    return min(config.max_position_embeddings, MAX_SEQ_LEN)


def find_longest_context(plan: Plan, folder: Path) -> int:
    """Return the context that memory allows for the plan with the most drafts."""

    def state_bytes(context: int) -> int:
        return sum(map(count_state_bytes, make_state_specs(replace(plan, max_seq_len=context))))

    limit, weights = limit_context(plan.config), count_weights_bytes(plan, folder)
    return choose_context(limit, measure_memory(), weights, state_bytes)


def note_context(request: BuildRequest, plan: Plan) -> None:
    """Log a note if the context is not what the model was trained for."""
    length, limit = plan.max_seq_len, plan.config.max_position_embeddings
    if length > limit:
        beyond = "is beyond the checkpoint's max_position_embeddings"
        untested = "what the model says there is untested"
        logger.warning("note: --max-seq-len %d %s %d: %s", length, beyond, limit, untested)
    elif request.max_seq_len is None and length < limit:
        default = f"the default of target {request.target}"
        reason = "what memory allows" if plan.style.packs_weights else default
        tokens = f"{length:,} tokens of the model's {limit:,}, which is {reason}"
        logger.warning("note: requests may have %s; --max-seq-len sets it", tokens)
