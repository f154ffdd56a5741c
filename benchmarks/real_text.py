"""Measures engines of SmolLM2-135M-Instruct on real text, beside llama.cpp on the same file.

    python tools/real_models.py fetch              # prints the path of the GGUF file
    tools/peers_env.sh                             # once: llama.cpp, in .venv-peers
    mtpbuild build --model smollm2-135m --checkpoint FILE --nextn 0,1,2,3,auto --weights int4
    python benchmarks/real_text.py FILE engines/smollm2_135m_n{0,1,2,3,auto}_int4

All sides answer the same 40 prompts (questions, code of Python's library, pages of docs/), at
temperature 0 and 0.7, one at a time and in turn: so a prompt meets all sides in the same seconds of
the machine. A rate counts tokens after the first; ratios are medians over prompts. Relaxed
acceptance is measured last, beside strict acceptance of the same engine.
"""

import argparse
import calendar
import difflib
import fnmatch
import heapq
import inspect
import json
import math
import shlex
import statistics
import string
import textwrap
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from operator import mul
from pathlib import Path
from typing import Any

from peer.llama_server import DIRECT, PATIENCE, started
from rich.console import Console
from rich.table import Table
from script import PEERS, run

from mtpbuild.lab.measure.host import measure_bandwidth
from mtpbuild.runtime import Engine, Result, SamplingParams
from mtpbuild.runtime.errors import UsageError

LLAMA = "llama.cpp"
TOKENS, LEAST, ROWS = 128, 16, 2048  # most and fewest of an answer that counts; of a context
KINDS = ("chat", "code", "summary")
QUESTIONS = (
    "What is the difference between weather and climate?",
    "Give me three tips for learning to play the guitar.",
    "Why does bread rise when it is baked?",
    "Write a short letter to a neighbour whose dog barks at night.",
    "Plan a weekend in a small town by the sea.",
    "How do vaccines work?",
    "What should I look for when I buy a used bicycle?",
    "Explain inflation to a child of ten years.",
    "Tell me a story about a lighthouse keeper and a lost boat.",
    "What are the advantages of trains over planes?",
    "How can I remember the names of people I meet?",
    "Describe how a bill becomes a law.",
    "Suggest a dinner for four with rice and vegetables.",
    "Why is the sea salty?",
)
FUNCTIONS: tuple[Any, ...] = (
    calendar.monthrange, calendar.leapdays, difflib.get_close_matches, difflib.ndiff,
    fnmatch.filter, heapq.nsmallest, inspect.cleandoc, json.loads, shlex.join, statistics.median,
    string.capwords, textwrap.dedent, textwrap.shorten,
)  # fmt: skip
PAGES = (
    "acceptance", "adaptive", "bench", "cpu-kernels", "distributed", "engine-format", "eval",
    "glossary", "plan", "plugins", "quantisation", "trace", "verify",
)  # fmt: skip
Speeds = dict[str, dict[str, list[float]]]  # tokens per second by side and kind of prompt


def list_prompts() -> list[tuple[str, str]]:
    """Return each prompt's kind and text."""
    docs = Path(__file__).resolve().parents[1] / "docs"
    texts = {
        "chat": QUESTIONS,
        "code": [f"What does this do?\n\n{inspect.getsource(f)[:1200]}" for f in FUNCTIONS],
        "summary": [
            f"Summarise this page:\n\n{(docs / f'{page}.md').read_text()[:1200]}" for page in PAGES
        ],
    }
    return [(kind, text) for kind in KINDS for text in texts[kind]]


def ask_llama(url: str, prompt: list[int], temperature: float) -> tuple[int, float]:
    """Return the number of tokens, and tokens per second after the first by the server's clock."""
    body: dict[str, Any] = {"prompt": prompt, "n_predict": TOKENS, "seed": 0}
    body |= {"temperature": temperature, "samplers": ["temperature"], "cache_prompt": False}
    asked = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with DIRECT.open(asked, timeout=PATIENCE) as response:
        timings = json.load(response)["timings"]
    count = timings["predicted_n"]
    return count, (count - 1) / timings["predicted_ms"] * 1000


def measure(
    engines: dict[str, Engine], url: str, temperature: float, prompts: list[tuple[str, str]]
) -> tuple[Speeds, list[str]]:
    """Answer all prompts on all sides in turn; return speeds, and lines about drafts and texts."""
    speeds: Speeds = defaultdict(lambda: defaultdict(list))
    first = next(iter(engines.values()))
    how = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=0)
    results, short = defaultdict[str, list[Result]](list), 0
    for kind, text in prompts:
        ids = first.chat_ids([{"role": "user", "content": text}])
        count, speed = ask_llama(url, ids, temperature)
        answers = {name: engine.generate(ids, how) for name, engine in engines.items()}
        for name, answer in answers.items():
            results[name].append(answer)
        if min(count, *(len(answer.token_ids) for answer in answers.values())) < LEAST:
            short += 1
            continue
        speeds[LLAMA][kind].append(speed)
        for name, answer in answers.items():
            speeds[name][kind].append(1 / take_time(answer))
    texts = zip(*([answer.token_ids for answer in side] for side in results.values()), strict=True)
    same = sum(all(tokens == each[0] for tokens in each) for each in texts)
    lines = [
        f"{short} of {len(prompts)} prompts had an answer of less than {LEAST} tokens and are left "
        f"out; the same text from all engines: {same} of {len(prompts)}"
    ]
    return speeds, lines + [f"{name}: {describe(side)}" for name, side in results.items()]


def describe(results: list[Result]) -> str:
    """Say how many drafts were accepted in all."""
    drafts = [result.metrics.speculative_decoding for result in results]
    steps = [sum(part.acceptance_histogram) for part in drafts]
    tokens = sum(len(result.token_ids) for result in results)
    places = zip(*(part.per_position_acceptance_rates for part in drafts), strict=True)
    rates = [sum(map(mul, place, steps)) / sum(steps) for place in places]
    shown = " ".join(f"{rate:.2f}" for rate in rates)
    return f"acceptance length {tokens / sum(steps):.2f}, by draft {shown or 'none'}"


def measure_relaxed(engines: dict[str, Engine], prompts: list[tuple[str, str]]) -> Table:
    """Return a table of what relaxed acceptance gives and what it costs.

    It acts in thoughts, which this model lacks. So a line break after the chat template opens one,
    with strict acceptance as well, and it lasts until the answer's end.
    """
    table = Table("side", "over strict", "length", "strict", "same texts", "nats", "strict")
    table.title = "relaxed acceptance: tokens/s, acceptance length, -log p of a token"
    tokenizer = next(iter(engines.values())).tokenizer
    assert tokenizer is not None
    (begin,), end = tokenizer.encode("\n"), tokenizer.special_ids["<|im_end|>"]
    strict = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=0)
    relaxed = replace(
        strict,
        relaxed_topk=10,
        relaxed_delta=0.6,
        begin_thinking_phase_token=begin,
        end_thinking_phase_token=end,
    )
    pairs = defaultdict[str, list[tuple[Result, Result]]](list)
    for _, text in prompts:
        for name, engine in engines.items():
            ids = [*engine.chat_ids([{"role": "user", "content": text}]), begin]
            pairs[name].append((engine.generate(ids, relaxed), engine.generate(ids, strict)))
    for name, both in pairs.items():
        long = [pair for pair in both if min(len(side.token_ids) for side in pair) >= LEAST]
        ratio = statistics.median(take_time(b) / take_time(a) for a, b in long)
        same = sum(a.token_ids == b.token_ids for a, b in both)
        lengths, nats = zip(*(average(side) for side in zip(*both, strict=True)), strict=True)
        shown = (f"{number:.2f}" for number in (ratio, *lengths))
        table.add_row(name, *shown, f"{same} of {len(both)}", *(f"{loss:.3f}" for loss in nats))
    return table


def take_time(answer: Result) -> float:
    """Return the seconds per token of an answer of several tokens."""
    assert answer.metrics.tpot_s is not None
    return answer.metrics.tpot_s


def average(results: Iterable[Result]) -> tuple[float, float]:
    """Return tokens per step, and the nats that the model gives a token against its choice."""
    sides = list(results)
    drafts = [result.metrics.speculative_decoding for result in sides]
    losses = [-token.logprob for result in sides for token in result.logprobs or ()]
    steps = sum(sum(part.acceptance_histogram) for part in drafts)
    return sum(len(result.token_ids) for result in sides) / steps, statistics.fmean(losses)


def show(speeds: Speeds, title: str) -> Table:
    """Return a table of median speeds and, over llama.cpp's on the same prompts, median ratios."""
    table = Table("side", *KINDS, "all", "of llama.cpp", title=title)
    peer = [speed for kind in KINDS for speed in speeds[LLAMA][kind]]
    for name, by_kind in speeds.items():
        every = [speed for kind in KINDS for speed in by_kind[kind]]
        ratio = statistics.median(a / b for a, b in zip(every, peer, strict=True))
        medians = [
            statistics.median(part or [math.nan]) for part in (*(by_kind[k] for k in KINDS), every)
        ]
        table.add_row(name, *(f"{speed:.1f}" for speed in medians), f"{ratio:.2f}")
    return table


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("file", type=Path, help="the GGUF file that the engines were built of")
    parser.add_argument("engines", type=Path, nargs="+")
    parser.add_argument("--prompts", type=int, default=1, help="take every so-manieth prompt")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    server = PEERS / "llama-server"
    if not server.is_file():
        raise UsageError(f"{server}: no such file: tools/peers_env.sh makes it")
    if not args.file.is_file():
        raise UsageError(f"{args.file}: no such file: tools/real_models.py fetches it")
    prompts, console = list_prompts()[:: args.prompts], Console(width=100)
    room = {"slots": 1, "rows": ROWS, "threads": args.threads}
    with started(server, args.file, **room) as url:
        engines = {
            folder.name: Engine.load(folder, threads=args.threads, prefix_cache=False)
            for folder in args.engines
        }
        console.print(f"memory reads at {measure_bandwidth() / 1e9:.0f} GB/s")
        for temperature in (0.0, 0.7):
            measure(engines, url, temperature, prompts[:1])  # warms all up
            speeds, lines = measure(engines, url, temperature, prompts)
            console.print(show(speeds, f"tokens/s, temperature {temperature}"))
            console.print("\n".join(lines))
        console.print(measure_relaxed(engines, prompts))
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    run(main)
