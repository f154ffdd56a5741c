"""Measures how much accuracy bfloat16 caches cost deepseek-tiny's int8 and int4 engines.

    python benchmarks/cache_accuracy.py [--work runs/cache_accuracy] [--texts 24] [--tokens 100]

The fp32 engine continues prompts greedily. Then each engine with integer weights scores every
token of these texts given the tokens before it, with caches of both types. `loss` is the mean of
the negative log-probabilities in nats, and `first` the share of tokens that are the engine's own
first choice. `moved` is the mean and the largest difference of a token's log-probability from the
engine with fp32 caches.
"""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from script import load_both, parse_flags, run

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime import Engine, SamplingParams

Texts = list[tuple[int, list[int]]]  # number of the prompt's tokens, and all tokens


def built(work: Path, weights: str | None, caches: str) -> Path:
    out = work / f"{weights or 'fp32'}_{caches}"
    options, scheme = {"cache_dtype": caches}, build_scheme(weights)
    request = BuildRequest(
        "deepseek-tiny", (0,), out=out, scheme=scheme, options=options, score=True
    )
    [engine] = build(request)
    return engine.folder


def continued(folder: Path, texts: int, tokens: int) -> Texts:
    """Return the first prompts of the built-in sets, alternating, with the engine's answers."""
    with Engine.load(folder, threads=1, prefix_cache=False) as engine:
        prompts = load_both(engine, texts, tokens)
        answers = engine.generate(prompts, SamplingParams(tokens, temperature=0.0))
        pairs = zip(prompts, answers, strict=True)
        return [(len(prompt), [*prompt, *answer.token_ids]) for prompt, answer in pairs]


def scored(folder: Path, texts: Texts) -> list[tuple[float, bool]]:
    """Return each answered token's log-probability, and whether it is the first choice."""
    params = SamplingParams(0, prompt_logprobs=1)
    with Engine.load(folder, threads=1, prefix_cache=False) as engine:
        results = [engine.generate(ids, params).prompt_logprobs or () for _, ids in texts]
    pairs = zip(texts, results, strict=True)
    tokens = [token for (start, _), found in pairs for token in found[start - 1 :]]
    return [(token.logprob, token.top[0][0] == token.token_id) for token in tokens]


def compare(work: Path, texts: int, tokens: int) -> Table:
    """Build all engines; return a table with a row for each engine of integer weights."""
    table = Table("weights", "caches", "tokens", "loss", "first", "moved: mean", "largest")
    answered = continued(built(work, None, "float32"), texts, tokens)
    for weights in ("int8", "int4"):
        plain: list[float] = []
        for caches in ("float32", "bfloat16"):
            found = scored(built(work, weights, caches), answered)
            logprobs = [logprob for logprob, _ in found]
            plain = plain or logprobs
            moved = [abs(a - b) for a, b in zip(logprobs, plain, strict=True)]
            count = len(found)
            row = f"{-sum(logprobs) / count:.4f}", f"{sum(first for _, first in found) / count:.2%}"
            table.add_row(
                *(weights, caches, str(count), *row),
                *(f"{sum(moved) / count:.4f}", f"{max(moved):.3f}"),
            )
    return table


def main() -> None:
    arguments = parse_flags(__doc__, work=Path("runs/cache_accuracy"), texts=24, tokens=100)
    Console().print(compare(arguments.work, arguments.texts, arguments.tokens))


if __name__ == "__main__":
    run(main)
