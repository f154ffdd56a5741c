"""Measures how much accuracy smaller caches cost an engine with int8 or int4 weights.

    python benchmarks/cache_accuracy.py [--model deepseek-tiny] [--weights int4] [--texts 3]
        [--context 2000] [--work runs/cache_accuracy]

The engine with fp32 weights continues the built-in prompts greedily. Prompts and answers are joined
to texts of `context` tokens, which each engine scores: every token given those before it. `loss` is
the mean of the negative log-probabilities in nats, and `first` the share of tokens that are the
engine's own first choice. `KL` is the mean divergence from another engine over its TOP first tokens
and all others as one, and `moved` the mean and the largest difference of a token's log-probability.
With fp32 caches the other engine has fp32 weights, so this is what the weights' rounding costs;
otherwise it has equal weights and fp32 caches.
"""

import math
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from script import load_both, parse_flags, run

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.requests.request import TokenLogprobs

TOP = 20
PROMPTS, ANSWER = 48, 100  # all prompts; most tokens of an answer
CACHES = ("float32", "bfloat16", "int8")
Texts = list[list[int]]
Scores = list[TokenLogprobs]


def built(work: Path, model: str, weights: str | None, caches: str) -> Path:
    out = work / f"{model}_{weights or 'fp32'}_{caches}"
    options, scheme = {"cache_dtype": caches}, build_scheme(weights)
    request = BuildRequest(model, (0,), out=out, scheme=scheme, options=options, score=True)
    [engine] = build(request)
    return engine.folder


def continued(folder: Path, texts: int, context: int) -> Texts:
    """Return texts of `context` tokens each: prompts of the built-in sets and their answers."""
    with Engine.load(folder, threads=1, prefix_cache=False) as engine:
        prompts = load_both(engine, PROMPTS, ANSWER)
        tokens = list[int]()
        for prompt in prompts:
            if len(tokens) >= texts * context:
                break
            answer = engine.generate(prompt, SamplingParams(ANSWER, temperature=0.0))
            tokens += [*prompt, *answer.token_ids]
    found = [tokens[at : at + context] for at in range(0, texts * context, context)]
    return [text for text in found if len(text) == context]


def scored(folder: Path, texts: Texts) -> Scores:
    """Return the log-probabilities at each token of all texts."""
    params = SamplingParams(0, prompt_logprobs=TOP)
    with Engine.load(folder, threads=1, prefix_cache=False) as engine:
        results = [engine.generate(ids, params).prompt_logprobs or () for ids in texts]
    return [token for found in results for token in found if token is not None]


def divergence(one: TokenLogprobs, other: TokenLogprobs) -> float:
    """Return KL(one | other) over the first tokens that both know, and all others as one."""
    known = dict(other.top)
    pairs = [(p, known[token]) for token, p in one.top if token in known]
    rests = (math.log(max(1e-9, 1 - sum(map(math.exp, each)))) for each in zip(*pairs, strict=True))
    p, q = rests
    return sum(math.exp(a) * (a - b) for a, b in [*pairs, (p, q)])


def mean(numbers: Iterable[float]) -> float:
    found = [*numbers]
    return sum(found) / len(found)


def compare(work: Path, model: str, weights: str, texts: int, context: int) -> Table:
    """Build all engines; return a table with a row for each type of caches."""
    table = Table("caches", "tokens", "loss", "first", "KL", "moved: mean", "largest")
    floats = built(work, model, None, "float32")
    answered = continued(floats, texts, context)
    before = scored(floats, answered)
    for caches in CACHES:
        found = scored(built(work, model, weights, caches), answered)
        moved = [abs(a.logprob - b.logprob) for a, b in zip(found, before, strict=True)]
        table.add_row(
            *(caches, str(len(found)), f"{-mean(each.logprob for each in found):.4f}"),
            f"{mean(each.top[0][0] == each.token_id for each in found):.2%}",
            f"{mean(map(divergence, before, found)):.6f}",
            *(f"{mean(moved):.4f}", f"{max(moved):.3f}"),
        )
        if caches == CACHES[0]:
            before = found
    return table


def main() -> None:
    arguments = parse_flags(
        __doc__,
        model="deepseek-tiny",
        weights="int4",
        texts=3,
        context=2000,
        work=Path("runs/cache_accuracy"),
    )
    Console().print(compare(**vars(arguments)))


if __name__ == "__main__":
    run(main)
