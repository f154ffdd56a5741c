"""The checks of an engine; each returns a finding, or raises NotChecked with the reason."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mtpbuild.builder.bench.figures import merged
from mtpbuild.builder.checkpoint.layers_slice import LayersSlice, parse_layers
from mtpbuild.builder.checks import needs
from mtpbuild.builder.recipe import find_model
from mtpbuild.builder.verify.compare import MOST, PARTED, Finding, NotChecked, compare, equal
from mtpbuild.builder.verify.distribution import fit, known_prefixes, survival
from mtpbuild.builder.verify.play import Played, play
from mtpbuild.builder.weights.scheme import engine_scheme
from mtpbuild.runtime import Engine, Manifest, SamplingParams, errors
from mtpbuild.runtime.cpu_library import ISA_VARIABLE, ISAS
from mtpbuild.runtime.errors import install
from mtpbuild.runtime.stats import COLLAPSED

SETTINGS: tuple[dict[str, Any], ...] = (  # of the sampled texts, in turn
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "draft_sample_method": "greedy"},
)
REJECTION_PROMPTS = 4
P_VALUE = 1e-6  # a correct engine falls below it once in a million times
JUDGED = 100  # drafts; the acceptance rate of fewer is too uncertain
ROUNDED = 0.5  # replaces compare.MOST where products also round their inputs: integers, bfloat16
SHORTEST, SHORT = 4, 16  # number of prompts, and of tokens of their texts, for each instruction set
PLAIN_LIMIT = 2 * 10**9  # most parameters that are loaded in fp32 to judge an engine


@dataclass(frozen=True)
class Case:
    """An engine, the engine that it is compared with, and the prompts for both."""

    engine: Engine
    base: Engine | str  # of nextn 0, or why there is none
    # Loads the same engine with another prefill `chunk` or number of `threads`.
    reloaded: Callable[..., Engine]
    prompts: list[list[int]]
    length: int  # tokens of each text
    seeds: int  # sampled texts per prompt for `rejection_distribution`
    checkpoint: str | None  # recipe or folder; None: the recipe of the engine's model

    @cached_property
    def greedy(self) -> list[Played]:
        return self.play(self.params())

    def compare(
        self,
        params: Sequence[SamplingParams],
        ours: list[Played],
        theirs: list[Played],
        engine: Engine | None = None,
        base: Engine | None = None,
    ) -> Finding:
        """Compare texts; where two differ, the engine (or another one) continues the other text.

        base: the engine of `theirs`, if it is another one than ours. Two exact engines agree to the
        bit. In bfloat16 a product of one row rounds differently from one of four, so any text may
        diverge. With integer weights the inputs are rounded to int8, where the last digit decides.
        """
        if all(each.manifest.build.exact for each in (self.engine, base) if each is not None):
            return equal(ours, theirs)

        def replay(number: int, known: list[int], count: int) -> Played:
            own = replace(params[number], max_tokens=count)
            return play(engine or self.engine, [self.prompts[number] + known], [own])[0]

        most, parted = (ROUNDED, 1.0) if rounds(self.engine.manifest) else (MOST, PARTED)
        return compare(ours, theirs, replay, most, parted)

    def play(
        self, params: list[SamplingParams], engine: Engine | None = None, together: bool = False
    ) -> list[Played]:
        """Run all prompts on this engine, or on another one."""
        return play(engine or self.engine, self.prompts, params, together=together)

    def params(self, *settings: dict[str, Any]) -> list[SamplingParams]:
        """Return each prompt's parameters: greedy, or the settings in turn, seeded by number."""
        plain = SamplingParams(max_tokens=self.length, ignore_eos=True)
        numbers = range(len(self.prompts))
        if not settings:
            return [plain for _ in numbers]
        return [replace(plain, seed=i, **settings[i % len(settings)]) for i in numbers]

    def require_base(self) -> Engine:
        if isinstance(self.base, str):
            raise NotChecked(self.base)
        return self.base


def rounds(manifest: Manifest) -> bool:
    """Return whether a difference in the last digit may be rounded to a larger one."""
    return manifest.build.block_size is not None or manifest.build.dtype == "bfloat16"


def greedy_text(case: Case) -> Finding:
    base, params = case.require_base(), case.params()
    return case.compare(params, case.greedy, case.play(params, base), base=base)


def plain_text(case: Case) -> Finding:
    """Compare with the plain model, if PyTorch and the checkpoint are here."""
    manifest = case.engine.manifest
    model = manifest.model
    if model.parameters > PLAIN_LIMIT:
        raise NotChecked(f"{model.parameters:,} parameters are too many for the plain model")
    missing = f"PyTorch is not installed: {install('build')}"
    with needed_here(manifest, "--model", missing):
        source = find_model(
            case.checkpoint or manifest.whole_model,
            revision=None if case.checkpoint else manifest.build.revision,
        )
        with needs("build", "torch"):
            from mtpbuild.builder.verify.plain import judge, load_plain
    scheme = engine_scheme(manifest.build.quantised_to, manifest.build.head_weights)
    plain = load_plain(source.folder, layers_of(manifest), scheme)
    return judge(plain, case.prompts, case.greedy, ROUNDED if rounds(manifest) else MOST)


@contextmanager
def needed_here(manifest: Manifest, flags: str, without: str) -> Iterator[None]:
    """Turn a missing file or package into the reason why a check can't be made.

    flags: the flags that name the model instead. without: the reason if a package is missing.
    """
    try:
        yield
    except errors.UnknownRecipeError:
        raise NotChecked(f"no recipe is called {manifest.whole_model}: give {flags}") from None
    except errors.MissingWeightsError as error:
        raise NotChecked(str(error)) from None
    except errors.MissingDependencyError as error:
        raise NotChecked(without.format(error)) from None


def layers_of(manifest: Manifest) -> LayersSlice | None:
    """Return the layers of its model that an engine has; None stands for all."""
    return None if manifest.build.layers is None else parse_layers(manifest.build.layers)


def sampled_text(case: Case) -> Finding:
    base, params = case.require_base(), case.params(*SETTINGS)
    return case.compare(params, case.play(params), case.play(params, base), base=base)


def chunks(case: Case) -> Finding:
    """Prefill prompts in smaller chunks than the engine was built for."""
    size = min(5, case.engine.manifest.build.prefill_chunk - 1)
    if size < 1 or max(map(len, case.prompts)) <= size + 1:
        raise NotChecked("no prompt is longer than a chunk")
    engine, params = case.reloaded(chunk=size), case.params()
    return case.compare(params, case.play(params, engine), case.greedy, engine)


def machine(case: Case) -> Finding:
    """Run an exact engine with other numbers of threads, and with each instruction set."""
    if not case.engine.manifest.build.exact:
        raise NotChecked("the engine is not exact")
    prompts = sorted(case.prompts, key=len)[:SHORTEST]
    params = [replace(p, max_tokens=min(SHORT, case.length)) for p in case.params(*SETTINGS)]
    params = params[: len(prompts)]
    wanted, tried = play(case.engine, prompts, params), list[str]()
    for isa in (*ISAS, None):
        for threads in (1, 2) if isa is None else (2,):
            try:
                with instructions(isa), case.reloaded(threads=threads) as engine:
                    found = equal(play(engine, prompts, params), wanted)
            except errors.EngineError as error:
                if isa is None or "this machine has" not in str(error):
                    raise
                continue  # this machine lacks the instruction set
            tried.append(isa or f"{threads} thread{'s'[: threads - 1]}")
            if not found.passed:
                return replace(found, detail=f"{tried[-1]}: {found.detail}")
    return replace(found, detail=f"{found.detail} each: {', '.join(tried)}")


@contextmanager
def instructions(isa: str | None) -> Iterator[None]:
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


def batch(case: Case) -> Finding:
    """Run greedy, sampled and rejection-sampled requests at once, and each alone."""
    size = case.engine.manifest.build.max_batch
    if size == 1:
        raise NotChecked("the engine takes one request at a time (--max-batch 1)")
    rejecting = {"temperature": 0.8, "acceptance": "rejection"}
    params = case.params({}, SETTINGS[0], rejecting)
    return case.compare(params, case.play(params, together=True), case.play(params))


def relaxed_top_1(case: Case) -> Finding:
    """Run relaxed acceptance with only the most probable token allowed, which is strict."""
    vocabulary = case.engine.manifest.model.vocab_size
    params = [
        replace(
            own,
            relaxed_delta=1.0,
            begin_thinking_phase_token=prompt[-1],  # so that the text begins in the thinking phase
            end_thinking_phase_token=(prompt[-1] + 1) % vocabulary,
            logprobs=0,  # so that a greedy request uses the program decode_mixed
        )
        for own, prompt in zip(case.params(), case.prompts, strict=True)
    ]
    return case.compare(params, case.play(params), case.greedy)


def rejection_distribution(case: Case) -> Finding:
    """Compare the first nextn + 2 tokens at temperature 1 with their exact probabilities.

    The probabilities follow from the log-probabilities of the nextn 0 engine (or of this one).
    """
    length = case.engine.manifest.build.nextn + 2
    hot = SamplingParams(max_tokens=length, ignore_eos=True, temperature=1.0)
    judge = case.engine if isinstance(case.base, str) else case.base
    statistic, freedom, worst = 0.0, 0, (0.0, "")
    step = max(1, len(case.prompts) // REJECTION_PROMPTS)
    chosen = range(0, len(case.prompts), step)[:REJECTION_PROMPTS]
    for number in chosen:
        prompts = [case.prompts[number]] * case.seeds
        params = [replace(hot, seed=seed) for seed in range(case.seeds)]
        known = known_prefixes(play(judge, prompts, params, together=True))
        rejecting = [replace(own, acceptance="rejection") for own in params]
        texts = play(case.engine, prompts, rejecting, together=True)
        found = fit([text.token_ids for text in texts], known)
        statistic, freedom = statistic + found.statistic, freedom + found.freedom
        prefix, times, expected = found.worst
        line = f"text {number} begins with {list(prefix)} {times} times, expected {expected:.1f}"
        worst = max(worst, (found.statistic, line))
    if freedom == 0:
        raise NotChecked("the model is certain of its next tokens: there is no law to compare")
    p_value = survival(statistic, freedom)
    figures = {"p_value": p_value, "chi_square": statistic, "degrees_of_freedom": freedom}
    said = f"p-value {p_value:.2g} (chi-square {statistic:.1f}, {freedom} degrees of freedom, "
    said += f"{len(chosen) * case.seeds:,} texts of {length} tokens)"
    fits = p_value > P_VALUE
    return Finding(fits, said if fits else f"{said}: {worst[1]}", figures)


def acceptance(case: Case) -> Finding:
    """Check that drafts are accepted at all: with damaged MTP modules the text is still correct."""
    if case.engine.manifest.build.drafter in (None, "none"):
        raise NotChecked("the engine drafts nothing")
    found = merged([text.drafting for text in case.greedy])
    if found.num_draft_tokens < JUDGED or found.draft_acceptance_rate is None:
        raise NotChecked(f"only {found.num_draft_tokens} drafts were judged")
    rates = " ".join(f"{rate:.2f}" for rate in found.per_position_acceptance_rates)
    said = f"acceptance length {found.mean_acceptance_length:.2f}, per position {rates}"
    works = found.draft_acceptance_rate >= COLLAPSED
    if not works:
        said += ": the MTP modules are damaged, or of another model"
    figures = {
        "mean_acceptance_length": found.mean_acceptance_length,
        "draft_acceptance_rate": found.draft_acceptance_rate,
    }
    return Finding(works, said, figures)


CHECKS: dict[str, Callable[[Case], Finding]] = {
    "greedy text is that of nextn 0": greedy_text,
    "greedy text is the plain model's": plain_text,
    "sampled text is that of nextn 0": sampled_text,
    "prompt chunks change nothing": chunks,
    "a batch changes nothing": batch,
    "the machine changes nothing": machine,
    "relaxed top-1 is strict": relaxed_top_1,
    "rejection has the model's law": rejection_distribution,
    "drafts are accepted": acceptance,
}
