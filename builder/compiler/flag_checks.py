"""Checks of a request that need no more than its flags and the model's config.json."""

from pathlib import Path

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.checkpoint.shards import offer_unnamed_head
from mtpbuild.builder.compiler.draft_vocab import DRAFT_VOCAB, draft_ids
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import find_family_of
from mtpbuild.builder.plan.plan import Nextn, sort_nextns
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.targets import configure_target, list_target_names
from mtpbuild.builder.targets.target import Target
from mtpbuild.builder.weights.scheme import FLOATS, Scheme
from mtpbuild.runtime.checks import in_range
from mtpbuild.runtime.contract.controls import CONSTRAINTS, CONTROLS
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.rules import find_rule
from mtpbuild.runtime.contract.targets import find_target, list_targets_with
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.text.tokenizer_files import read_template


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
            f"--dump {request.dump} needs programs, which --dry-run does not make: drop one of them"
        )
    if request.exact and not target.may_be_exact:
        can = list_target_names(lambda other: other.may_be_exact)
        raise UsageError(
            f"--exact: target {target.name} makes no exact engines; give --target {can}"
        )
    return target


def check_format(target: Target, flag: str, format: str | None) -> None:
    """Raise UsageError for a format that the target can't keep, and name the targets that can."""
    if format is not None and format not in target.formats:
        keeps = ", ".join(target.formats) or "no quantised weights"
        can = list_target_names(lambda other: format in other.formats)
        raise UsageError(
            f"{flag} {format}: target {target.name} keeps {keeps}; {format} is for target {can}"
        )


def check_calibration(scheme: Scheme | None, config: ModelConfig) -> None:
    """Raise UsageError for a calibration of a model whose layers can't run one by one."""
    family = find_family_of(config)
    if scheme is not None and scheme.calibration is not None and not family.runs_by_layer(config):
        raise UsageError(
            f"{family.name}: its layers can't run one by one, which calibration needs: leave it out"
        )


def choose_draft_ids(
    request: BuildRequest, nextns: tuple[Nextn, ...], folder: Path, config: ModelConfig
) -> tuple[int, ...]:
    """Return the ids of the tokens that drafts are chosen from; () means all tokens.

    A head that was trained for some tokens has their ids in its folder.
    """
    if config.head:
        if request.draft_vocab is not None:
            raise UsageError(
                f"--draft-vocab is for MTP modules, not for {config.head.title}: leave it out"
            )
        return config.draft_ids
    vocab_size = config.vocab_size
    if request.draft_vocab is None:
        ids = None if request.mtp is None else request.mtp / DRAFT_VOCAB
        trained = ids is not None and ids.is_file() and nextns != (0,) and request.ranks.tp == 1
        return draft_ids(str(ids), folder, vocab_size) if trained else ()
    if nextns == (0,):
        raise UsageError("--draft-vocab is for engines that draft: --nextn 0 has no drafts")
    if request.ranks.tp > 1:
        raise UsageError("--draft-vocab needs an engine of one rank: leave --tp out")
    return draft_ids(request.draft_vocab, folder, vocab_size)


def choose_nextns(config: ModelConfig, request: BuildRequest, folder: Path) -> tuple[Nextn, ...]:
    """Return the requested nextns, or else the number of the checkpoint's MTP modules."""
    if request.nextn is not None:
        return sort_nextns(request.nextn)
    if config.num_nextn_predict_layers == 0:
        raise UsageError(
            "the checkpoint has no MTP modules: say --nextn 0 to build without, join a head of the "
            "same model with --mtp FILE_OR_FOLDER, or make one by `mtpbuild tune-head --new`"
            f"{offer_unnamed_head(folder)}"
        )
    return (config.head.usual_nextn if config.head else config.num_nextn_predict_layers,)


def check_target(target: Target, request: BuildRequest, nextns: tuple[Nextn, ...]) -> None:
    """Raise UsageError for flags that the target can't build, and name the targets that can."""
    if "auto" in nextns and Feature.ADAPT not in find_target(target.name).features:
        can = list_targets_with(Feature.ADAPT)
        raise UsageError(f"--nextn auto is for target {can}, not {target.name}: give numbers")
    if (request.ranks.tp, request.ranks.ep) != (1, 1) and not target.several_ranks:
        can = list_target_names(lambda other: other.several_ranks)
        raise UsageError(f"--tp and --ep are for target {can}: leave them out")
    if request.rank is not None:
        if request.ranks.tp == 1:
            raise UsageError(f"--rank {request.rank} needs --tp, the number of ranks")
        in_range(request.rank, 0, request.ranks.tp - 1, "--rank")
    target.check(request)


def check_style(
    target: Target, request: BuildRequest, config: ModelConfig, style: GraphStyle
) -> None:
    """Raise UsageError for a model, or scores, that the form of the target's graphs can't have."""
    family = find_family_of(config)
    if style.for_gpu and config.head:
        raise UsageError(f"{config.head.title} has no GPU kernel yet: build for the CPU")
    attention = family.attention
    if style.for_gpu and attention not in target.gpu_attention:
        can = list_target_names(lambda other: attention in other.gpu_attention)
        where = f"in target {target.name}: build with target {can}, or" if can else "yet: build"
        raise UsageError(f"{family.name}: its {attention} has no GPU kernel {where} for the CPU")
    if request.score and (
        style.for_gpu
        or request.ranks.tp > 1
        or Feature.SCORE not in find_target(target.name).features
    ):
        raise UsageError(f"--score is for target {list_targets_with(Feature.SCORE)}: leave it out")


def name_suffix(request: BuildRequest, style: GraphStyle, draft_ids: tuple[int, ...]) -> str:
    """Return the end of an engine folder's name: target, types, draft vocabulary, rules and ranks.

    Requests that differ in other flags share a folder: the later build replaces the earlier one.
    """
    suffix = f"_{request.target}" if style.for_gpu else ""
    suffix += "_bf16" if style.dtype == "bfloat16" else ""
    suffix += f"_{request.scheme.main or FLOATS}" if request.scheme else ""
    suffix += f"_{bits:g}bits" if request.scheme and (bits := request.scheme.bits) else ""
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
