"""Counts texts of deepseek-tiny that are the same with drafts as without, by weights' format.

    python benchmarks/same_text.py [--work runs/same_text] [--texts 12] [--tokens 70]

For fp32, int8 and int4, and for a portable graph in fp32, it builds nextn 0 and 3 and continues the
same prompts with both. Every third request is greedy; the others are sampled at temperature 0.8
with a seed. Besides equal texts it counts texts whose log-probabilities are all equal to the bit.
"""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from script import load_both, parse_flags, run

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime import Engine, Result, SamplingParams

NEXTN = 3
ENGINES: tuple[tuple[str | None, bool], ...] = (  # weights, and whether the graph is portable
    (None, False),
    ("int8", False),
    ("int4", False),
    (None, True),
)


def results(folder: Path, texts: int, tokens: int) -> list[Result]:
    """Return the engine's answers to the first prompts of the built-in sets, alternating."""
    with Engine.load(folder, threads=1, prefix_cache=False) as engine:
        prompts = load_both(engine, texts, tokens)
        asked = [
            SamplingParams(tokens, temperature=0.8 if i % 3 else 0.0, seed=i, logprobs=0)
            for i in range(texts)
        ]
        return [engine.generate(*pair) for pair in zip(prompts, asked, strict=True)]


def compare(work: Path, texts: int, tokens: int) -> Table:
    """Build both engines of each format and compare them; return a row for each format."""
    table = Table("weights", "same tokens", "same log-probabilities")
    for weights, portable in ENGINES:
        name = (weights or "fp32") + ("_portable" if portable else "")
        out = work / name
        request = BuildRequest("deepseek-tiny", (0, NEXTN), out=out, scheme=build_scheme(weights))
        build(replace(request, options={"portable": portable}))
        engines = sorted(path.parent for path in out.glob("*/engine.json"))
        plain, drafted = (results(folder, texts, tokens) for folder in engines)
        pairs = list(zip(plain, drafted, strict=True))
        same = sum(a.token_ids == b.token_ids for a, b in pairs)
        bits = sum(a.logprobs == b.logprobs for a, b in pairs)
        found = f"{same} of {texts}", f"{bits} of {texts}"
        table.add_row(name, *found)
    return table


def main() -> None:
    arguments = parse_flags(__doc__, work=Path("runs/same_text"), texts=12, tokens=70)
    Console().print(compare(arguments.work, arguments.texts, arguments.tokens))


if __name__ == "__main__":
    run(main)
