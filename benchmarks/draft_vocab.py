"""Measures how many accepted drafts a reduced draft vocabulary costs, and how much time it saves.

    python benchmarks/draft_vocab.py [--work runs/draft_vocab] [--layers 2] [--rounds 5]

The first part measures the acceptance length of deepseek-tiny, nextn 3, over the built-in prompts;
drafts are chosen from all tokens, a half, a quarter and an eighth of them. The second part measures
a step of some layers of GigaChat3-10B-A1.8B's shape with random weights, in int4 with embedding and
head in int8, nextn 1 and 3. Engines take turns, round after round, and medians are compared. It
writes about 3 GB into --work.
"""

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

from acceptance import acceptance_length
from one.files import QUARTER
from one.random_checkpoint import write_checkpoint
from one.shapes import MOE, published
from rich.console import Console
from rich.table import Table
from script import load_prompts, parse_flags, run

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.measure.prompts import BUILT_IN
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.placed import read_places
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import WEIGHTS

PROMPT, TOKENS = [*range(5, 37)], 48


def acceptance(work: Path) -> Table:
    """Measure deepseek-tiny's acceptance lengths, a row for each size of the draft vocabulary."""
    table = Table("draft vocabulary", *BUILT_IN)
    for count in (None, 1024, 512, 256):
        asked = None if count is None else str(count)
        out = work / f"tiny_{count or 'all'}"
        build(BuildRequest("deepseek-tiny", (3,), out=out, draft_vocab=asked))
        cells = []
        with Engine.load(out, prefix_cache=False) as engine:
            for kind in BUILT_IN:
                prompts = load_prompts(engine, kind, 20, 192)
                params = SamplingParams(max_tokens=192)
                cells.append(f"{acceptance_length(engine, prompts, params):.2f}")
        table.add_row(str(count or "all 2,048"), *cells)
    return table


def step_times(work: Path, layers: int, rounds: int) -> Table:
    """Measure median steps and the bytes of the head that drafts read, a row for each nextn."""
    shape, checkpoint = published(MOE, layers, "fp32"), work / f"shape_{layers}"
    write_checkpoint(checkpoint, shape)
    ids = work / "quarter.json"
    ids.write_text(json.dumps([*range(shape.config.vocab_size // QUARTER)]))
    table = Table(
        f"{layers} layers, int4", "head of a draft", "step, all tokens", "step, a quarter", "ratio"
    )
    for nextn in (1, 3):
        request = BuildRequest(
            str(checkpoint), (nextn,), max_seq_len=512, scheme=build_scheme("int4")
        )
        asked = {"all": request, "quarter": replace(request, draft_vocab=str(ids))}
        folders = {name: work / f"shape_{layers}_n{nextn}_{name}" for name in asked}
        for name, one in asked.items():
            build(replace(one, out=folders[name]))
        times = dict[str, list[float]]({name: [] for name in asked})
        for _ in range(rounds):
            for name, folder in folders.items():
                times[name].append(step_time(folder))
        every, some = (statistics.median(times[name]) for name in asked)
        sizes = [
            head_bytes(folders["all"], "lm_head"),
            head_bytes(folders["quarter"], "draft_head"),
        ]
        table.add_row(
            f"nextn {nextn}",
            " -> ".join(f"{size / 1e6:.0f} MB" for size in sizes),
            f"{1e3 * every:.1f} ms",
            f"{1e3 * some:.1f} ms",
            f"{some / every:.2f}",
        )
    return table


def step_time(folder: Path) -> float:
    """Measure a request's mean seconds per step, after a short warm-up request."""
    with Engine.load(folder, threads=2, prefix_cache=False) as engine:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        engine.generate(PROMPT, replace(params, max_tokens=4))
        start = time.perf_counter()
        result = engine.generate(PROMPT, params)
        seconds = time.perf_counter() - start
    report = result.metrics.speculative_decoding
    return seconds / report.num_spec_steps


def head_bytes(folder: Path, name: str) -> int:
    places = read_places(folder / WEIGHTS)
    return sum(place.size for tensor, place in places.items() if tensor.startswith(f"{name}."))


def main() -> None:
    arguments = parse_flags(__doc__, work=Path("runs/draft_vocab"), layers=2, rounds=5)
    arguments.work.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print(acceptance(arguments.work))
    console.print(step_times(arguments.work, arguments.layers, arguments.rounds))


if __name__ == "__main__":
    run(main)
