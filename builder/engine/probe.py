"""Plays a few texts on an engine that was just built, in ways that must not matter to an exact one.

It is `mtpbuild verify` in small: what is checked is in engine.json, and a difference is told.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mtpbuild.builder.verify.checks import Case, batch, chunks
from mtpbuild.builder.verify.compare import Finding, NotChecked, equal
from mtpbuild.builder.verify.play import load_again, play
from mtpbuild.runtime import Engine
from mtpbuild.runtime.errors import MtpbuildError

TOKENS, LENGTHS = 8, (3, 20)  # of each text, and of the prompts


@dataclass(frozen=True)
class Probed:
    """Says what was checked, and the first thing that was found wrong."""

    checked: tuple[str, ...] = ()
    wrong: str | None = None


def probe(folder: Path) -> Probed:
    """Make every check that such an engine allows; its manifest must be there."""
    checked = list[str]()
    try:
        with ExitStack() as stack:
            engine = stack.enter_context(Engine.load(folder, threads=1))

            def reloaded(chunk: int | None = None, threads: int = 2) -> Engine:
                return stack.enter_context(load_again(folder, engine, chunk, threads))

            case = Case(engine, "", reloaded, [*prompts(engine)], TOKENS, seeds=0, checkpoint=None)
            for name, check in CHECKS.items():
                try:
                    found = check(case)
                except NotChecked:
                    continue
                if not found.passed:
                    return Probed(wrong=f"{name}, but: {found.detail}")
                checked.append(name)
    except MtpbuildError as error:
        return Probed(wrong=f"it was not probed: {error}")
    return Probed(tuple(checked))


def prompts(engine: Engine) -> Iterator[list[int]]:
    """Make prompts of any tokens, as far as the engine takes them."""
    most, vocabulary = engine.manifest.build.max_seq_len, engine.manifest.model.vocab_size
    for length in LENGTHS:
        if length + TOKENS <= most:
            yield [(37 * place + length) % vocabulary for place in range(length)]


def steps(case: Case) -> Finding:
    """Go on from half of each text: a prompt then fills in the rows that steps have filled in."""
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
    return equal(play(case.engine, longer, params), rest)


CHECKS = {
    "steps fill in what prompts do": steps,
    "prompt chunks and threads change nothing": chunks,  # the engine is loaded with two threads
    "a batch changes nothing": batch,
}
