"""Checks that need nothing but the engine, and the probe that runs them on a new engine.

The probe is a small `mtpbuild verify`: engine.json lists its checks, and a difference is reported.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mtpbuild.lab.measure.compare import Finding, NotChecked, compare_bits, compare_texts
from mtpbuild.lab.measure.runs import TimedAnswer, reload_engine, run_prompts
from mtpbuild.runtime import Engine, Manifest, SamplingParams
from mtpbuild.runtime.errors import MtpbuildError

SETTINGS: tuple[dict[str, Any], ...] = (  # of the sampled texts, in turn
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "draft_sample_method": "greedy"},
)
TOKENS = 8  # of each text of the probe
LENGTHS = (3, 20)  # of the probe's prompts
# In place of LARGEST_DIFFERENCE, for integers and bfloat16, whose products also round their inputs.
ROUNDED = 0.5


@dataclass(frozen=True)
class Case:
    """An engine, and the prompts that it is checked with."""

    engine: Engine
    reload: Callable[..., Engine]  # with another prefill `chunk` or number of `threads`
    prompts: list[list[int]]
    length: int  # tokens of each text

    @cached_property
    def greedy(self) -> list[TimedAnswer]:
        return self.run(self.params())

    def compare(
        self,
        params: Sequence[SamplingParams],
        ours: list[TimedAnswer],
        theirs: list[TimedAnswer],
        engine: Engine | None = None,
        base: Engine | None = None,
    ) -> Finding:
        """Compare texts; after a difference `engine`, or the case's own, continues their text.

        base: the engine of `theirs`, if it is not ours. Two exact engines agree to the bit. In
        bfloat16 a product of one row rounds differently from one of four, so any text may diverge.
        With integer weights inputs are rounded to int8, which can enlarge the smallest difference.
        """
        compared = [engine for engine in (self.engine, base) if engine is not None]
        if all(engine.manifest.build.counts_as_exact for engine in compared):
            return compare_bits(ours, theirs)

        def replay(number: int, known: list[int], count: int) -> TimedAnswer:
            continued = replace(params[number], max_tokens=count)
            prompt = self.prompts[number] + known
            return run_prompts(engine or self.engine, [prompt], [continued])[0]

        rounded = rounds_inputs(self.engine.manifest)
        limits = {"largest_difference": ROUNDED, "diverging_share": 1.0} if rounded else {}
        return compare_texts(ours, theirs, replay, **limits)

    def run(
        self, params: list[SamplingParams], engine: Engine | None = None, together: bool = False
    ) -> list[TimedAnswer]:
        """Run all prompts on this engine, or on another one."""
        return run_prompts(engine or self.engine, self.prompts, params, together=together)

    def params(self, *settings: dict[str, Any]) -> list[SamplingParams]:
        """Return each prompt's parameters: greedy, or the settings in turn, seeded by number."""
        plain = SamplingParams(max_tokens=self.length, ignore_eos=True)
        numbers = range(len(self.prompts))
        if not settings:
            return [plain for _ in numbers]
        return [replace(plain, seed=i, **settings[i % len(settings)]) for i in numbers]


def rounds_inputs(manifest: Manifest) -> bool:
    """Return whether rounding may enlarge a difference in the last digit."""
    return manifest.build.block_size is not None or manifest.build.dtype == "bfloat16"


def check_chunks(case: Case) -> Finding:
    """Prefill prompts in smaller chunks than the engine was built for."""
    size = min(5, case.engine.manifest.build.prefill_chunk - 1)
    if size < 1 or max(map(len, case.prompts)) <= size + 1:
        raise NotChecked("no prompt is longer than a chunk")
    params = case.params()
    with case.reload(chunk=size) as engine:
        return case.compare(params, case.run(params, engine), case.greedy, engine)


def check_batch(case: Case) -> Finding:
    """Run greedy, sampled and rejection-sampled requests at once, and each alone."""
    size = case.engine.manifest.build.max_batch
    if size == 1:
        raise NotChecked("the engine takes one request at a time (--max-batch 1)")
    params = case.params({}, SETTINGS[0], {"temperature": 0.8, "acceptance": "rejection"})
    return case.compare(params, case.run(params, together=True), case.run(params))


@dataclass(frozen=True)
class ProbeResult:
    """The checks that passed, or else the first difference that was found."""

    checked: tuple[str, ...] = ()
    wrong: str | None = None


def probe(folder: Path) -> ProbeResult:
    """Run every check that this engine allows; its manifest must be there."""
    checked = list[str]()
    try:
        with Engine.load(folder, threads=1, prefix_cache=False) as engine:
            reload = partial(reload_engine, folder, engine, threads=2)
            case = Case(engine, reload, [*make_prompts(engine)], TOKENS)
            for name, check in PROBES.items():
                try:
                    finding = check(case)
                except NotChecked:
                    continue
                if not finding.passed:
                    return ProbeResult(wrong=f"{name}, but: {finding.detail}")
                checked.append(name)
    except MtpbuildError as error:
        return ProbeResult(wrong=f"it was not probed: {error}")
    return ProbeResult(tuple(checked))


def make_prompts(engine: Engine) -> Iterator[list[int]]:
    """Yield prompts of arbitrary tokens, in those `LENGTHS` that fit into the engine."""
    vocabulary = engine.manifest.model.vocab_size
    for length in LENGTHS:
        if length + TOKENS <= engine.manifest.build.max_seq_len:
            yield [(37 * place + length) % vocabulary for place in range(length)]


def check_steps(case: Case) -> Finding:
    """Continue each text from its middle: now a prompt fills the rows that steps filled before."""
    if not case.prompts:
        raise NotChecked("the engine takes no prompt of them")
    half = TOKENS // 2
    longer = [
        [*prompt, *text.token_ids[:half]]
        for prompt, text in zip(case.prompts, case.greedy, strict=True)
    ]
    params = [replace(p, max_tokens=TOKENS - half) for p in case.params()]
    rest = [
        replace(text, token_ids=text.token_ids[half:], logprobs=text.logprobs[half:])
        for text in case.greedy
    ]
    return compare_bits(run_prompts(case.engine, longer, params), rest)


PROBES = {
    "steps fill in what prompts do": check_steps,
    # Its engine is loaded again, with two threads.
    "prompt chunks and threads change nothing": check_chunks,
    "a batch changes nothing": check_batch,
}
