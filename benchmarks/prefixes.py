"""Measures the time to a first token after a prefix that an engine was built with.

python benchmarks/prefixes.py engines/tiny_n3
python benchmarks/prefixes.py engines/large_n1 --rounds 3 --colds 1

The engine takes one request (`--max-batch 1`) and has no prefixes; it is not changed. A prompt has
20 tokens after 2,000 that are computed (cold), are a prefix of the engine (prefix), or were left by
an earlier prompt (cached). Each round asks each of them once, in turn (cold ones only in the first
--colds rounds), and medians are reported; the first use of a prefix, which checks its hash, is
reported separately. The engine is also loaded without prefixes and with ten. The exit code is 1 if
a prefix takes more than 1.1 times as long as what an earlier prompt left or more than 1/20 of a
cold start, or if ten prefixes make loading 50 ms longer.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from script import parse_flags, run

from mtpbuild.builder.compiler.prefixes import load_prefix_function, write_manifest, write_prefix
from mtpbuild.builder.engine.layout import link_files
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest

PREFIX, NEW, TEN = 2000, 20, 10  # tokens, tokens, prefixes
TO_CACHED, TO_COLD, LOADING = 1.1, 1 / 20, 0.05
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def copy_with_prefixes(engine: Path, out: Path, each: list[list[int]], threads: int | None) -> None:
    """Link an engine's files to a new folder, and add prefixes there."""
    manifest = read_manifest(engine)
    link_files(engine, out, manifest.files)
    compute = load_prefix_function(engine, manifest, threads)
    for number, tokens in enumerate(each):
        write_prefix(out, manifest, f"p{number}", tokens, compute(tokens))
    write_manifest(out, manifest)


def first_token(engine: Engine, prompt: list[int], cached: int) -> float:
    """Return the seconds to a first token; exit unless `cached` tokens were reused."""
    metrics = engine.generate(prompt, ONE).metrics
    if abs(metrics.cached_tokens - cached) > engine.manifest.lookahead:
        sys.exit(f"{metrics.cached_tokens} tokens were there, not {cached}")
    assert metrics.ttft_s is not None
    return metrics.ttft_s


def loading(folder: Path, threads: int | None) -> float:
    start = time.perf_counter()
    with Engine.load(folder, threads=threads, prefix_cache=False):
        return time.perf_counter() - start


class Measured:
    """The same engine in several states: cold, with an earlier prompt's rows, with a prefix."""

    def __init__(self, engine: Path, built: Path, threads: int | None, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.vocabulary = read_manifest(engine).model.vocab_size
        self.prefix_ids = self.ids(PREFIX)
        copy_with_prefixes(engine, built, [self.prefix_ids], threads)
        self.cold = Engine.load(engine, threads=threads, prefix_cache=False)
        self.cached = Engine.load(engine, threads=threads, prefix_cache=True)
        self.prefix = Engine.load(built, threads=threads, prefix_cache=False)

    def ids(self, count: int) -> list[int]:
        return self.random.integers(10, self.vocabulary, count).tolist()

    def ask(self, name: str) -> float:
        prompt = self.prefix_ids + self.ids(NEW)
        if name == "cached":  # give the slot to another prompt
            self.cached.generate(self.ids(NEW), ONE)
        return first_token(getattr(self, name), prompt, 0 if name == "cold" else PREFIX)

    def prepare(self) -> None:
        """Fill in the prefix where it is kept, and run each program once."""
        for engine in (self.cached, self.prefix, self.cold):
            engine.generate(self.ids(NEW), ONE)
        self.cached.generate(self.prefix_ids + self.ids(NEW), ONE)


def main() -> None:
    own = parse_flags(__doc__, "engine", rounds=15, colds=3, threads=None, seed=0)
    with tempfile.TemporaryDirectory(dir=own.engine.resolve().parent) as place:
        built, ten = Path(place, "one"), Path(place, "ten")
        measured = Measured(own.engine, built, own.threads, own.seed)
        measured.prepare()
        first_use = measured.ask("prefix")
        found: dict[str, list[float]] = {name: [] for name in ("cold", "cached", "prefix")}
        for number in range(own.rounds):
            for name, seconds in found.items():
                if name != "cold" or number < own.colds:
                    seconds.append(measured.ask(name))
        size = read_manifest(built).files["prefixes/p0.safetensors"].size
        short = [measured.ids(PREFIX) for _ in range(TEN)]
        copy_with_prefixes(own.engine, ten, short, own.threads)
        loads = [(loading(own.engine, own.threads), loading(ten, own.threads)) for _ in range(5)]
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    bare, with_ten = (statistics.median(each) for each in zip(*loads, strict=True))
    for name, median in middle.items():
        print(f"{name:8} {median * 1e3:9.1f} ms  ({len(found[name])} times)")
    print(f"first use of the prefix {first_use * 1e3:.1f} ms, its file {size / 1e6:.1f} MB")
    print(f"prefix / cached {middle['prefix'] / middle['cached']:.3f}")
    print(f"cold / prefix {middle['cold'] / middle['prefix']:.1f}")
    print(f"loading {bare * 1e3:.0f} ms, with {TEN} prefixes {with_ten * 1e3:.0f} ms")
    slow = middle["prefix"] > min(TO_CACHED * middle["cached"], TO_COLD * middle["cold"])
    if slow or with_ten - bare > LOADING:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
