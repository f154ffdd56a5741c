"""Run a few texts on a new engine in ways that must not change the text of an exact one.

This is a small `mtpbuild verify`: engine.json lists the checks, and a difference is reported.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mtpbuild.builder.measure.checks import Case, batch, chunks
from mtpbuild.builder.measure.compare import Finding, NotChecked, equal
from mtpbuild.builder.measure.runs import reload_engine, run_prompts
from mtpbuild.runtime import Engine
from mtpbuild.runtime.errors import MtpbuildError

TOKENS, LENGTHS = 8, (3, 20)  # tokens of each text, and of the prompts


@dataclass(frozen=True)
class ProbeResult:
    """The checks that passed, or else the first difference that was found."""

    checked: tuple[str, ...] = ()
    wrong: str | None = None


def probe(folder: Path) -> ProbeResult:
    """Run every check that this engine allows; its manifest must be there."""
    checked = list[str]()
    try:
        with ExitStack() as stack:
            engine = stack.enter_context(Engine.load(folder, threads=1))

            def reloaded(chunk: int | None = None, threads: int = 2) -> Engine:
                return stack.enter_context(reload_engine(folder, engine, chunk, threads))

            case = Case(engine, reloaded, [*prompts(engine)], TOKENS)
            for name, check in CHECKS.items():
                try:
                    found = check(case)
                except NotChecked:
                    continue
                if not found.passed:
                    return ProbeResult(wrong=f"{name}, but: {found.detail}")
                checked.append(name)
    except MtpbuildError as error:
        return ProbeResult(wrong=f"it was not probed: {error}")
    return ProbeResult(tuple(checked))


def prompts(engine: Engine) -> Iterator[list[int]]:
    """Yield prompts of arbitrary tokens, as long as they fit into the engine."""
    most, vocabulary = engine.manifest.build.max_seq_len, engine.manifest.model.vocab_size
    for length in LENGTHS:
        if length + TOKENS <= most:
            yield [(37 * place + length) % vocabulary for place in range(length)]


def steps(case: Case) -> Finding:
    """Continue each text from its half: a prompt then fills the rows that steps have filled."""
    if not case.prompts:
        raise NotChecked("the engine takes no prompt of them")
    half = TOKENS // 2
    longer = [
        [*prompt, *text.token_ids[:half]]
        for prompt, text in zip(case.prompts, case.greedy, strict=True)
    ]
    params = [replace(own, max_tokens=TOKENS - half) for own in case.params()]
    rest = [
        replace(text, token_ids=text.token_ids[half:], logprobs=text.logprobs[half:])
        for text in case.greedy
    ]
    return equal(run_prompts(case.engine, longer, params), rest)


CHECKS = {
    "steps fill in what prompts do": steps,
    "prompt chunks and threads change nothing": chunks,  # loads the engine again, with two threads
    "a batch changes nothing": batch,
}
