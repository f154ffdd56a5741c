"""Makes measurements by hand and engines without weights, for the tests of `mtpbuild bench`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtpbuild.builder.plan.plan import Nextn
from mtpbuild.lab.bench.figures import make_rows
from mtpbuild.lab.bench.measure import Contender, Measurements
from mtpbuild.lab.bench.report import Benchmark
from mtpbuild.lab.eval.problems import GradedAnswer, Problem
from mtpbuild.lab.measure.host import describe_machine
from mtpbuild.lab.measure.prompts import Prompt
from mtpbuild.lab.measure.runs import TimedAnswer
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.requests.stats import AcceptanceCounter, SpeculativeDecoding
from tests.support import fakes


def small_tokens(history: Sequence[int]) -> int:
    """Return next tokens that the smallest vocabulary has too, and never an end of sequence."""
    return 2 + sum((i + 1) * t for i, t in enumerate(history)) % 50


def prompt(kind: str = "code", number: int = 0, length: int = 4, most: int = 8) -> Prompt:
    return Prompt(kind, number, [0, *range(2, length + 1)], SamplingParams(most))


def drafting(histogram: list[int], drafted: int) -> SpeculativeDecoding:
    acceptance = AcceptanceCounter(len(histogram) - 1)
    acceptance.histogram, acceptance.drafted = histogram, drafted
    return acceptance.report()


def answer(
    kind: str, times: Sequence[float], histogram: list[int], begun: float = 0.0
) -> TimedAnswer:
    """Make a request in which all tokens of every step were kept."""
    tokens = sum((j + 1) * steps for j, steps in enumerate(histogram))
    assert sum(histogram) == len(times)
    nextn = len(histogram) - 1
    report = drafting(histogram, nextn * (len(times) - 1))
    return TimedAnswer(prompt(kind), begun, list(times), list(range(tokens)), report)


def by_hand() -> dict[Nextn, Measurements]:
    """Make two requests of nextn 0 (5 tokens, 2 s each) and of nextn 2.

    With nextn 2 they are the same 5 tokens in 3 steps of 3 s, and 4 tokens.
    """
    base = [answer("code", [3, 5, 7, 9, 11], [5]), answer("talk", [2, 4, 6, 8, 10], [5])]
    fast = [answer("code", [4, 7, 10], [1, 2, 0]), answer("talk", [3, 6, 10, 13], [3, 1, 0])]
    return {
        0: Measurements([[s] for s in base], steps=[2.0, 2.0, 9.0]),
        2: Measurements([[s] for s in fast], steps=[3.0, 3.0, 1.0], verify=[2.5]),
    }


def fake_engine(nextn: int, **build: Any) -> Engine:
    return fakes.fake_engine(nextn=nextn, max_seq_len=1024, **build)[0]


def contender(nextn: int, **build: Any) -> Contender:
    verifier = fake_engine(nextn, **build) if nextn else None
    drafter = "mtp-eagle" if nextn else None
    return Contender(nextn, drafter, fake_engine(nextn, **build), verifier)


def made_by_hand(concurrency: int = 1) -> Benchmark:
    rows = make_rows([contender(0), contender(2)], by_hand())
    folders: dict[Nextn, str] = {nextn: f"engines/fake_n{nextn}" for nextn in (0, 2)}
    settings = {"concurrency": concurrency, "sampling": asdict(SamplingParams())}
    return Benchmark("fake", describe_machine(2), settings | {"num_requests": 2}, folders, rows)


def graded_answers(form: str, texts: Sequence[str], times: list[float]) -> list[GradedAnswer]:
    """Make an answer of each text to a problem whose right answer is 3."""
    answers = [answer(form, times, [1, len(times) - 1]) for _ in texts]
    return [GradedAnswer(Problem(a.prompt, "3"), t, a) for a, t in zip(answers, texts, strict=True)]


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
