"""Checks that need nothing but the engine, and what they run it with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mtpbuild.builder.measure.compare import MOST, PARTED, Finding, NotChecked, compare, equal
from mtpbuild.builder.measure.runs import Answer, run_prompts
from mtpbuild.runtime import Engine, Manifest, SamplingParams

SETTINGS: tuple[dict[str, Any], ...] = (  # of the sampled texts, in turn
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "draft_sample_method": "greedy"},
)
ROUNDED = 0.5  # replaces compare.MOST where products also round their inputs: integers, bfloat16


@dataclass(frozen=True)
class Case:
    """An engine, and the prompts that it is checked with."""

    engine: Engine
    # Loads the same engine with another prefill `chunk` or number of `threads`.
    reloaded: Callable[..., Engine]
    prompts: list[list[int]]
    length: int  # tokens of each text

    @cached_property
    def greedy(self) -> list[Answer]:
        return self.play(self.params())

    def compare(
        self,
        params: Sequence[SamplingParams],
        ours: list[Answer],
        theirs: list[Answer],
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

        def replay(number: int, known: list[int], count: int) -> Answer:
            own = replace(params[number], max_tokens=count)
            return run_prompts(engine or self.engine, [self.prompts[number] + known], [own])[0]

        most, parted = (ROUNDED, 1.0) if rounds(self.engine.manifest) else (MOST, PARTED)
        return compare(ours, theirs, replay, most, parted)

    def play(
        self, params: list[SamplingParams], engine: Engine | None = None, together: bool = False
    ) -> list[Answer]:
        """Run all prompts on this engine, or on another one."""
        return run_prompts(engine or self.engine, self.prompts, params, together=together)

    def params(self, *settings: dict[str, Any]) -> list[SamplingParams]:
        """Return each prompt's parameters: greedy, or the settings in turn, seeded by number."""
        plain = SamplingParams(max_tokens=self.length, ignore_eos=True)
        numbers = range(len(self.prompts))
        if not settings:
            return [plain for _ in numbers]
        return [replace(plain, seed=i, **settings[i % len(settings)]) for i in numbers]


def rounds(manifest: Manifest) -> bool:
    """Return whether a difference in the last digit may be rounded to a larger one."""
    return manifest.build.weights in ("int8", "int4") or manifest.build.dtype == "bfloat16"


def chunks(case: Case) -> Finding:
    """Prefill prompts in smaller chunks than the engine was built for."""
    size = min(5, case.engine.manifest.build.prefill_chunk - 1)
    if size < 1 or max(map(len, case.prompts)) <= size + 1:
        raise NotChecked("no prompt is longer than a chunk")
    engine, params = case.reloaded(chunk=size), case.params()
    return case.compare(params, case.play(params, engine), case.greedy, engine)


def batch(case: Case) -> Finding:
    """Run greedy, sampled and rejection-sampled requests at once, and each alone."""
    size = case.engine.manifest.build.max_batch
    if size == 1:
        raise NotChecked("the engine takes one request at a time (--max-batch 1)")
    rejecting = {"temperature": 0.8, "acceptance": "rejection"}
    params = case.params({}, SETTINGS[0], rejecting)
    return case.compare(params, case.play(params, together=True), case.play(params))
