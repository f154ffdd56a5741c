"""The checks of an engine; each returns a finding, or raises NotChecked with the reason."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice, parse_layers
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.scheme import read_scheme
from mtpbuild.lab.measure.checks import (
    SETTINGS,
    Case,
    check_batch,
    check_chunks,
)
from mtpbuild.lab.measure.compare import Finding, NotChecked, compare_bits
from mtpbuild.lab.measure.runs import run_prompts
from mtpbuild.lab.measure.statistics import sum_drafting
from mtpbuild.lab.verify.distribution import (
    compute_chi_square_p_value,
    compute_prefix_probabilities,
    fit_prefixes,
)
from mtpbuild.runtime import Engine, Manifest, SamplingParams, errors
from mtpbuild.runtime.contract.drafters import EAGLE, VANILLA
from mtpbuild.runtime.contract.rules import explain_missing_rule, find_rule, list_rules_of
from mtpbuild.runtime.contract.settings import MAX_LOGPROBS
from mtpbuild.runtime.cpu_library import ISA_VARIABLE, ISAS
from mtpbuild.runtime.errors import advise_install, explain_missing_package

DISTRIBUTION_PROMPTS = 4
P_VALUE = 1e-6  # a correct engine falls below it once in a million runs
LEAST_DRAFTS = 100  # drafts; the acceptance rate of fewer is too uncertain
COLLAPSED = 0.01  # acceptance rate below which drafting must be broken
MACHINE_PROMPTS = 4  # the shortest ones, for `check_machine`
MACHINE_TOKENS = 16  # of each text of `check_machine`
LACKS_ISA = "; this machine has "  # in the message of plugins/cpu/source/ops.cpp


@dataclass(frozen=True)
class VerifyCase(Case):
    """A case with an engine to compare with, and the model that both were built of."""

    base: Engine | str  # of nextn 0, or why there is none
    seeds: int  # sampled texts per prompt for `check_distribution`
    checkpoint: str | None = None  # recipe or folder; None: the recipe of the engine's model

    def require_base(self) -> Engine:
        if isinstance(self.base, str):
            raise NotChecked(self.base)
        return self.base


def check_greedy_text(case: VerifyCase) -> Finding:
    base = case.require_base()
    params = case.params()
    return case.compare(params, case.greedy, case.run(params, base), base=base)


def check_plain_text(case: VerifyCase) -> Finding:
    """Compare with the plain model, if PyTorch and the checkpoint are here."""
    manifest = case.engine.manifest
    source = find_checkpoint(case)
    from mtpbuild.lab.verify import plain

    layers = read_layers(manifest)
    return plain.compare_with_checkpoint(manifest, source, case.prompts, case.greedy, layers=layers)


def check_quality(case: VerifyCase) -> Finding:
    """Measure what the weights' rounding costs; nothing fails."""
    manifest = case.engine.manifest
    build = manifest.build
    if build.quantised_to is None:
        raise NotChecked("the build quantised no weights")
    source = find_checkpoint(case)
    layers = read_layers(manifest)
    from mtpbuild.lab.verify.plain import check_size, load_plain
    from mtpbuild.lab.verify.quality import acceptance_length, measure_distance, replace_modules

    check_size(manifest)
    model = load_plain(source, layers)
    params = [replace(p, logprobs=MAX_LOGPROBS) for p in case.params()]
    texts = case.engine.generate(case.prompts, params)
    distance = measure_distance(model, case.prompts, texts)
    figures: dict[str, Any] = {"kl": distance.kl, "same_first_choice": distance.same}
    detail = f"KL {distance.kl:.4f} nats a token, {distance.same:.1%} first choices equal"
    has_head = model.config.num_nextn_predict_layers == manifest.model.num_nextn_predict_layers
    if has_head and build.drafter in (EAGLE, VANILLA) and not (build.adaptive or build.draft_vocab):
        ids = [text.token_ids for text in texts]
        eagle = build.drafter == EAGLE
        lengths = {"engine": sum_drafting(case.greedy).mean_acceptance_length}
        lengths["checkpoint"] = acceptance_length(model, case.prompts, ids, build.nextn, eagle)
        if build.calibrated is None:
            scheme = read_scheme(build)
            replace_modules(model, load_plain(source, layers, scheme))
            name = "checkpoint_with_rounded_modules"
            lengths[name] = acceptance_length(model, case.prompts, ids, build.nextn, eagle)
        figures["acceptance_lengths"] = lengths
        named = (f"{name.replace('_', ' ')} {length:.2f}" for name, length in lengths.items())
        detail += f"; acceptance length: {', '.join(named)}"
    return Finding(True, detail, figures)


def find_checkpoint(case: VerifyCase) -> Path:
    """Return the checkpoint's folder; raise NotChecked if the plain model can't be loaded."""
    manifest = case.engine.manifest
    missing = f"PyTorch is not installed: {advise_install('build')}"
    with explain_missing(manifest, "--model", missing):
        source = find_model(
            case.checkpoint or manifest.whole_model,
            revision=None if case.checkpoint else manifest.build.revision,
        )
        with explain_missing_package("a comparison with the reference", "build", "torch"):
            from mtpbuild.lab.verify import plain  # noqa: F401  # it imports torch
    return source.folder


@contextmanager
def explain_missing(manifest: Manifest, flags: str, without: str) -> Iterator[None]:
    """Turn a missing file or package into the reason why a check can't be made.

    flags: those that can name the model. without: the reason if a package is missing; {} is which.
    """
    try:
        yield
    except errors.UnknownRecipeError:
        raise NotChecked(f"no recipe is called {manifest.whole_model}: give {flags}") from None
    except errors.MissingWeightsError as error:
        raise NotChecked(str(error)) from None
    except errors.MissingDependencyError as error:
        raise NotChecked(without.format(error)) from None


def read_layers(manifest: Manifest) -> LayersSlice | None:
    """Return which of its model's layers an engine has; None stands for all."""
    return None if manifest.build.layers is None else parse_layers(manifest.build.layers)


def check_sampled_text(case: VerifyCase) -> Finding:
    base = case.require_base()
    params = case.params(*SETTINGS)
    return case.compare(params, case.run(params), case.run(params, base), base=base)


def check_machine(case: VerifyCase) -> Finding:
    """Run an exact engine with other numbers of threads, and with each instruction set."""
    if not case.engine.manifest.build.counts_as_exact:
        raise NotChecked("the engine is not exact")
    prompts = sorted(case.prompts, key=len)[:MACHINE_PROMPTS]
    params = [
        replace(p, max_tokens=min(MACHINE_TOKENS, case.length)) for p in case.params(*SETTINGS)
    ]
    params = params[: len(prompts)]
    wanted = run_prompts(case.engine, prompts, params)
    tried = list[str]()
    for isa in (*ISAS, None):
        for threads in (1, 2) if isa is None else (2,):
            try:
                with use_instruction_set(isa), case.reload(threads=threads) as engine:
                    finding = compare_bits(run_prompts(engine, prompts, params), wanted)
            except errors.EngineError as error:
                if isa is None or LACKS_ISA not in str(error):
                    raise
                continue  # this machine lacks the instruction set
            tried.append(isa or ("1 thread" if threads == 1 else f"{threads} threads"))
            if not finding.passed:
                return replace(finding, detail=f"{tried[-1]}: {finding.detail}")
    return replace(finding, detail=f"{finding.detail} each: {', '.join(tried)}")


@contextmanager
def use_instruction_set(isa: str | None) -> Iterator[None]:
    """Let engines that load in the block use this instruction set; None: the machine's best."""
    before = os.environ.pop(ISA_VARIABLE, None)
    try:
        if isa is not None:
            os.environ[ISA_VARIABLE] = isa
        yield
    finally:
        os.environ.pop(ISA_VARIABLE, None)
        if before is not None:
            os.environ[ISA_VARIABLE] = before


def check_relaxed_top_1(case: Case) -> Finding:
    """Run relaxed acceptance with only the most probable token allowed, which is strict."""
    vocabulary = case.engine.manifest.model.vocab_size
    params = [
        replace(
            plain,
            relaxed_delta=1.0,
            begin_thinking_phase_token=prompt[-1],  # so that the text begins in the thinking phase
            end_thinking_phase_token=(prompt[-1] + 1) % vocabulary,
            logprobs=0,  # so that a greedy request uses the program decode_mixed
        )
        for plain, prompt in zip(case.params(), case.prompts, strict=True)
    ]
    return case.compare(params, case.run(params), case.greedy)


def check_distribution(case: VerifyCase, rule: str = "rejection") -> Finding:
    """Compare the first nextn + 2 tokens at temperature 1 with their exact probabilities.

    rule: the rule of acceptance. The probabilities follow from the log-probabilities of the nextn 0
    engine (or of this one).
    """
    length = case.engine.manifest.build.nextn + 2
    hot = SamplingParams(max_tokens=length, ignore_eos=True, temperature=1.0)
    judge = case.engine if isinstance(case.base, str) else case.base
    statistic = 0.0
    freedom = 0
    worst = (0.0, "")
    step = max(1, len(case.prompts) // DISTRIBUTION_PROMPTS)
    chosen = range(0, len(case.prompts), step)[:DISTRIBUTION_PROMPTS]
    for number in chosen:
        prompts = [case.prompts[number]] * case.seeds
        params = [replace(hot, seed=seed) for seed in range(case.seeds)]
        known = compute_prefix_probabilities(run_prompts(judge, prompts, params, together=True))
        rejecting = [replace(p, acceptance=rule) for p in params]
        texts = run_prompts(case.engine, prompts, rejecting, together=True)
        fit = fit_prefixes([text.token_ids for text in texts], known)
        statistic, freedom = statistic + fit.statistic, freedom + fit.freedom
        prefix, times, expected = fit.worst
        line = f"text {number} begins with {list(prefix)} {times} times, expected {expected:.1f}"
        worst = max(worst, (fit.statistic, line))
    if freedom == 0:
        raise NotChecked(
            "the model is certain of its next tokens: there is no distribution to compare"
        )
    p_value = compute_chi_square_p_value(statistic, freedom)
    figures = {"p_value": p_value, "chi_square": statistic, "degrees_of_freedom": freedom}
    detail = f"p-value {p_value:.2g} (chi-square {statistic:.1f}, {freedom} degrees of freedom, "
    detail += f"{len(chosen) * case.seeds:,} texts of {length} tokens)"
    fits = p_value > P_VALUE
    return Finding(fits, detail if fits else f"{detail}: {worst[1]}", figures)


def check_rule(case: VerifyCase, rule: str) -> Finding:
    """Check that a rule of another package has the model's distribution, if it says so."""
    if (missing := explain_missing_rule(rule, case.engine.manifest)) is not None:
        raise NotChecked(missing)
    if not find_rule(rule).lossless:
        raise NotChecked("the rule does not claim it")
    return check_distribution(case, rule)


def make_rule_checks(manifest: Manifest) -> dict[str, Callable[[VerifyCase], Finding]]:
    """Return a check for each of an engine's rules of other packages, by name."""
    return {
        f"{rule} has the model's distribution": partial(check_rule, rule=rule)
        for rule in list_rules_of(manifest)
    }


def check_acceptance(case: Case) -> Finding:
    """Check that drafts are accepted at all: with damaged MTP modules the text is still correct."""
    if case.engine.manifest.build.drafter in (None, "none"):
        raise NotChecked("the engine drafts nothing")
    drafting = sum_drafting(case.greedy)
    if drafting.num_draft_tokens < LEAST_DRAFTS or drafting.draft_acceptance_rate is None:
        raise NotChecked(f"only {drafting.num_draft_tokens} drafts were judged")
    rates = " ".join(f"{rate:.2f}" for rate in drafting.per_position_acceptance_rates)
    detail = f"acceptance length {drafting.mean_acceptance_length:.2f}, per position {rates}"
    works = drafting.draft_acceptance_rate >= COLLAPSED
    if not works:
        detail += ": the MTP modules are damaged, or of another model"
    figures = {
        "mean_acceptance_length": drafting.mean_acceptance_length,
        "draft_acceptance_rate": drafting.draft_acceptance_rate,
    }
    return Finding(works, detail, figures)


CHECKS: dict[str, Callable[[VerifyCase], Finding]] = {
    "greedy text is that of nextn 0": check_greedy_text,
    "greedy text is the plain model's": check_plain_text,
    "sampled text is that of nextn 0": check_sampled_text,
    "prompt chunks change nothing": check_chunks,
    "a batch changes nothing": check_batch,
    "the machine changes nothing": check_machine,
    "relaxed top-1 is strict": check_relaxed_top_1,
    "rejection has the model's distribution": check_distribution,
    "drafts are accepted": check_acceptance,
    "what rounding costs": check_quality,
}
