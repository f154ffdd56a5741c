"""Plays random requests at once, some of them cancelled: each gets the tokens that it gets alone.

python benchmarks/on_gpu/soak.py [--smoke --engine FOLDER] [--seconds 90] [--rows rows.jsonl]

Without --engine it builds one of deepseek-tiny for this GPU, nextn 3 and four requests; steps are
CUDA graphs, prompts begin alike in part, so that the prefix cache serves them.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.runtime import Engine
from on_gpu.checks import Checks, parse_flags
from tests.support.crowds import Case, texts

BEGINNING = range(100, 180)  # tokens of every second prompt
CASES, AT_ONCE = 32, 12


def soak(engine: Engine, seconds: float) -> str:
    """Return what was played; raise ValueError for tokens that differ from those alone."""
    cases = [Case(i, 120, BEGINNING if i % 2 else ()) for i in range(CASES)]
    alone = [[token for token, _ in text] for text in texts(engine, cases, at_once=False)]
    rng, end, played, cancelled = random.Random(0), time.monotonic() + seconds, 0, 0
    while not played or time.monotonic() < end:
        chosen = rng.sample(range(CASES), AT_ONCE)
        for i, text in zip(chosen, texts(engine, [cases[i] for i in chosen], True), strict=True):
            tokens = [token for token, _ in text]
            if tokens != alone[i][: len(tokens)] or len(tokens) < cases[i].kept:
                raise ValueError(f"request {i} after {played}: {tokens}, alone {alone[i]}")
            cancelled += len(tokens) < len(alone[i])
        played += AT_ONCE
    return f"{played} requests, {cancelled} of them cancelled"


def main() -> None:
    checks, flags = parse_flags(__doc__)
    if flags.smoke and flags.engine is None:
        checks.skip("tokens as alone")
        return
    with tempfile.TemporaryDirectory() as scratch:
        run(checks, flags.engine or build_engine(Path(scratch)), flags.seconds, not flags.smoke)
    checks.end()


def build_engine(scratch: Path) -> Path:
    request = BuildRequest(
        "deepseek-tiny",
        (3,),
        target="inductor",
        options={"device": "cuda"},
        max_batch=4,
        out=scratch / "engine",
    )
    return build(request, WORKBENCH)[0].folder


def run(checks: Checks, folder: Path, seconds: float, gpu: bool) -> None:
    with Engine.load(folder) as engine:
        checks.make("tokens as alone", lambda: soak(engine, seconds), gpu)


if __name__ == "__main__":
    main()
