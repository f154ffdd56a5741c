"""Turn a request into plans, with the checks that need no more than flags and config.json."""

import logging
from dataclasses import replace
from pathlib import Path

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.checkpoint.readable import name_stored_format, read_quantisation
from mtpbuild.builder.checkpoint.shards import offer_unnamed_head
from mtpbuild.builder.compiler.draft_vocab import draft_ids
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.models.modules import count_stored_modules
from mtpbuild.builder.models.ranks import check_ranks
from mtpbuild.builder.plan.context import USUAL, choose_context, count_weights_bytes
from mtpbuild.builder.plan.machine import measure_memory
from mtpbuild.builder.plan.plan import (
    ADAPTIVE_NEXTN,
    Nextn,
    Plan,
    choose_drafter,
    count_state_bytes,
    in_order,
    make_state_specs,
)
from mtpbuild.builder.plan.recipe import FoundModel, find_model
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.targets import configure_target, list_target_names
from mtpbuild.builder.targets.target import Target
from mtpbuild.builder.weights.scheme import FLOATS, SCHEMES
from mtpbuild.runtime.checks import in_range
from mtpbuild.runtime.contract.controls import CONSTRAINTS, CONTROLS
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import MAX_BATCH, MAX_CHUNK, MAX_SEQ_LEN
from mtpbuild.runtime.contract.rules import find_rule
from mtpbuild.runtime.contract.targets import find_target, list_targets_with
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.text.tokenizer_files import read_template

# The products of a layer that tell in which formats a checkpoint is.
PRODUCT = "model.layers.{}.{}_proj.weight"
PARTS = ("self_attn.o", "mlp.down", "mlp.experts.0.down")


def check_flags(request: BuildRequest) -> Target:
    """Make the checks that need no model, and so come before a download; return the target."""
    target = configure_target(request.target, request.options)
    if request.scheme is not None:
        check_format(target, "--weights", request.scheme.main)
        check_format(target, "--head-weights", request.scheme.head)
    if request.chat_template is not None:
        read_template(request.chat_template)
    if request.dump is not None and request.dump.exists():
        raise UsageError(f"--dump {request.dump} is there already: name a new folder")
    if request.dump is not None and request.dry_run:
        raise UsageError(
            f"--dump {request.dump}: a dry run compiles nothing: leave one of them out"
        )
    if request.exact and not target.may_be_exact:
        can = list_target_names(lambda other: other.may_be_exact)
        raise UsageError(f"--exact: engines of target {target.name} are not; those of {can} may be")
    return target


def check_format(target: Target, flag: str, format: str | None) -> None:
    """Raise UsageError for a format that the target can't keep, and name the targets that can."""
    if format is not None and format not in target.formats:
        keeps = ", ".join(target.formats) or "no quantised weights"
        can = list_target_names(lambda other: format in other.formats)
        raise UsageError(
            f"{flag} {format}: target {target.name} keeps {keeps}; {format} is for target {can}"
        )


def find_source(request: BuildRequest) -> tuple[FoundModel, ModelConfig]:
    """Return the model, or the requested slice of it, and its configuration."""
    found = find_model(request.model, request.checkpoint, request.revision)
    return cut_layers(request, replace(found, mtp=request.mtp))


def cut_layers(request: BuildRequest, source: FoundModel) -> tuple[FoundModel, ModelConfig]:
    """Return the model and its configuration; --layers cuts both and is added to the name."""
    config = load_config(source.folder)
    if source.mtp is not None:
        from mtpbuild.builder.weights.head import open_head

        modules = count_stored_modules(
            find_family_of(config), config, open_head(source.mtp, config).tensors
        )
        config = load_config(source.folder, modules)
    if request.layers is None:
        return source, config
    name, engine = (f"{n}-layers{request.layers}" for n in (source.name, source.engine))
    return replace(source, name=name, engine=engine), request.layers.of(config)


def make_plans(request: BuildRequest, source: FoundModel, config: ModelConfig) -> dict[Path, Plan]:
    """Return the plan of the engine for each nextn, by the engine's folder."""
    nextns = choose_nextns(config, request, source.folder)
    target = configure_target(request.target, request.options)
    check_target(target, request, nextns)
    style = target.style
    check_style(target, request, config, style)
    check_rules(target, request, style)
    check_ranks(config, request.ranks)
    capabilities = target.compute_capabilities(request)
    limit = min(config.max_position_embeddings, MAX_SEQ_LEN)
    length = min(limit, USUAL) if request.max_seq_len is None else request.max_seq_len
    ids = choose_draft_ids(request, nextns, source.folder, config.vocab_size)
    suffix = name_suffix(request, style, ids)
    plans = dict[Path, Plan]()
    for asked in nextns:
        nextn = ADAPTIVE_NEXTN if asked == "auto" else asked
        out = request.out or Path("engines")
        if request.out is None or len(nextns) > 1:
            out = out / f"{source.engine}_n{asked}{suffix}"
        plans[out] = Plan(
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
            scheme=request.scheme,
            rules=request.acceptance_rules,
            score=request.score,
            draft_ids=ids,  # nextn 0 too: engines of one build share their weights
        )
    settings, last = read_quantisation(source.folder), config.num_hidden_layers - 1
    stored = {name_stored_format(settings, PRODUCT.format(last, part)) for part in PARTS}
    for scheme in [request.scheme] if request.scheme else [SCHEMES[name] for name in stored]:
        target.check_formats((scheme.main, scheme.mtp, scheme.head), plans[out])
    # Engines with our kernels take memory only for the rows of their caches that are in use.
    if request.max_seq_len is None and style.packs_weights and length < limit:
        length = find_longest_context(plan=plans[out], limit=limit, folder=source.folder)
        plans = {out: replace(plan, max_seq_len=length) for out, plan in plans.items()}
    return plans


def find_longest_context(plan: Plan, limit: int, folder: Path) -> int:
    """Return the context that memory allows for the plan with the most drafts."""

    def state_bytes(context: int) -> int:
        return sum(map(count_state_bytes, make_state_specs(replace(plan, max_seq_len=context))))

    return choose_context(limit, measure_memory(), count_weights_bytes(plan, folder), state_bytes)


def choose_draft_ids(
    request: BuildRequest, nextns: tuple[Nextn, ...], folder: Path, vocab_size: int
) -> tuple[int, ...]:
    """Return the ids of the tokens that drafts are chosen from; () means all tokens."""
    if request.draft_vocab is None:
        return ()
    if nextns == (0,):
        raise UsageError("--draft-vocab is for engines that draft: --nextn 0 has no drafts")
    if request.ranks.tp > 1:
        raise UsageError("--draft-vocab is for one rank: with --tp every rank has a part of a head")
    return draft_ids(request.draft_vocab, folder, vocab_size)


def choose_nextns(config: ModelConfig, request: BuildRequest, folder: Path) -> tuple[Nextn, ...]:
    """Return the requested nextns, or else the number of the checkpoint's MTP modules."""
    if request.nextn is not None:
        return in_order(request.nextn)
    if config.num_nextn_predict_layers == 0:
        raise UsageError(
            "the checkpoint has no MTP modules: say --nextn 0 to build without, or join a head of "
            f"the same model with --mtp FILE_OR_FOLDER{offer_unnamed_head(folder)}"
        )
    return (config.num_nextn_predict_layers,)


def check_target(target: Target, request: BuildRequest, nextns: tuple[Nextn, ...]) -> None:
    """Raise UsageError for flags that the target can't build, and name the targets that can."""
    if "auto" in nextns and Feature.ADAPT not in find_target(target.name).features:
        can = list_targets_with(Feature.ADAPT)
        raise UsageError(f"--nextn auto is for target {can}, not {target.name}")
    if (request.ranks.tp, request.ranks.ep) != (1, 1) and not target.several_ranks:
        can = list_target_names(lambda other: other.several_ranks)
        raise UsageError(f"--tp and --ep are for target {can}")
    if request.rank is not None:
        if request.ranks.tp == 1:
            raise UsageError("--rank is one of several: say --tp, how many they are")
        in_range(request.rank, 0, request.ranks.tp - 1, "--rank")
    target.check(request)


def check_style(
    target: Target, request: BuildRequest, config: ModelConfig, style: GraphStyle
) -> None:
    """Raise UsageError for a model, or scores, that the form of the target's graphs can't have."""
    family = find_family_of(config)
    if style.for_gpu and family.attention not in target.gpu_attention:
        can = list_target_names(lambda other: family.attention in other.gpu_attention)
        where = f"in target {target.name}: build with target {can}, or" if can else "yet: build"
        raise UsageError(
            f"{family.name}: its {family.attention} has no GPU kernel {where} for the CPU"
        )
    if request.score and (
        style.for_gpu
        or request.ranks.tp > 1
        or Feature.SCORE not in find_target(target.name).features
    ):
        raise UsageError(f"--score is for target {list_targets_with(Feature.SCORE)}")


def name_suffix(request: BuildRequest, style: GraphStyle, draft_ids: tuple[int, ...]) -> str:
    """Return the end of an engine folder's name, which tells the request from the default one."""
    suffix = f"_{request.target}" if style.for_gpu else ""
    suffix += "_bf16" if style.dtype == "bfloat16" else ""
    suffix += f"_{request.scheme.main or FLOATS}" if request.scheme else ""
    suffix += f"_draft{len(draft_ids)}" if draft_ids else ""
    return suffix + "".join(f"_{name}" for name in request.acceptance_rules) + request.ranks.suffix


def check_rules(target: Target, request: BuildRequest, style: GraphStyle) -> None:
    """Raise UsageError for acceptance rules that are unknown, clash, or can't run on the target."""
    taken = {control.name for control in (*CONTROLS, *CONSTRAINTS)}
    for name in request.acceptance_rules:
        rule, flag = find_rule(name), f"--acceptance-rule {name}"
        if style.accepts_by_kernel and rule.kernel is None:
            raise UsageError(f"{flag}: it has no kernel, which target {target.name} needs")
        if style.accepts_by_kernel and rule.chooses is not None:
            raise UsageError(f"{flag}: it chooses tokens, which target {target.name} can't yet")
        for control in rule.controls:
            if control.name in taken:
                raise UsageError(f"{flag}: another control is called {control.name}")
            taken.add(control.name)


def note_context(request: BuildRequest, plan: Plan) -> None:
    """Log a note if the context is not what the model was trained for."""
    length, limit = plan.max_seq_len, plan.config.max_position_embeddings
    log = logging.getLogger(__name__)
    if length > limit:
        note = "note: --max-seq-len %d is beyond the checkpoint's max_position_embeddings %d: "
        note += "what the model says there is untested"
        log.warning(note, length, limit)
    elif request.max_seq_len is None and length < limit:
        why = "memory" if plan.style.packs_weights else f"the default of target {request.target}"
        note = "note: context %s of %s: %s; --max-seq-len asks for another"
        log.warning(note, f"{length:,}", f"{limit:,}", why)
