"""Checks in about 3 minutes whether mtpbuild got slower: compares a few ratios with recorded ones.

    make bench-check
    python benchmarks/check.py [--threads 2] [--record]

Most figures are ratios or shares within one run, which depend little on the machine; the two times
in seconds do depend on it. The exit code is 1 if a figure is worse than the recorded one by more
than its tolerance. --record writes benchmarks/results/check.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from one.files import Workshop, on_disk
from one.published import DRAFTING, PLAIN, SHORT
from one.shapes import MOE, published
from one.sides import WARM, decode, ours, prompt
from rich.console import Console
from rich.table import Table
from script import run
from serving import Server, Work
from serving import ours as serve_ours

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.lab.bench.bench import BenchRequest, bench
from mtpbuild.lab.measure.host import describe_machine
from mtpbuild.lab.measure.prompts import Dataset
from mtpbuild.lab.measure.statistics import ALL
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.runtime import Engine, SamplingParams

RECORDED = Path(__file__).parent / "results" / "check.json"
MODEL, NEXTN = "deepseek-tiny", 3
FIRST_TOKEN = """
import time
start = time.perf_counter()
import sys
from mtpbuild.runtime import Engine, SamplingParams
with Engine.load(sys.argv[1], threads=int(sys.argv[2]), prefix_cache=False) as engine:
    engine.generate("def fibonacci(n):", SamplingParams(max_tokens=1))
    print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Figure:
    """A figure and its aim; tolerance: the relative change for the worse that counts as noise."""

    name: str
    tolerance: float
    aim: float
    more_is_better: bool = False
    unit: str = "x"

    def worse(self, value: float, recorded: float) -> bool:
        change = value / recorded - 1
        return (-change if self.more_is_better else change) > self.tolerance


# Two successive runs of the same code differed by 10 % in a speedup and by 23 % in d.
FIGURES = {
    "reasoning": Figure("nextn 3 over nextn 0, reasoning", 0.15, 2.2, more_is_better=True),
    "code": Figure("nextn 3 over nextn 0, code", 0.15, 1.7, more_is_better=True),
    "auto": Figure("nextn auto over the better of 0 and 3", 0.1, 0.96, more_is_better=True),
    "v": Figure("v: a step of 4 tokens over one of 1", 0.15, 1.2),
    "d": Figure("d: three drafts over a step of 1", 0.35, 0.25),
    "host": Figure("the host's share of a step", 0.5, 3, unit="%"),
    "load": Figure("load to first token", 0.3, 0.5, unit="s"),
    "build": Figure("build of nextn 3, cold", 0.3, 60, unit="s"),
    # serving.py with the engine of that build: tokens/s over HTTP over those in a process.
    "http1": Figure("1 user over HTTP over Engine.stream", 0.1, 0.95, more_is_better=True),
    "http8": Figure("8 users over HTTP over 8 in a process", 0.1, 0.95, more_is_better=True),
    # As in one_machine.py, with four layers of GigaChat3-10B's shape, int4; aims are of all layers.
    "step": Figure("4 layers of 10B: a step of nextn 1 over one of 0", 0.15, 1.9),
    "memory": Figure("4 layers of 10B: peak memory over the engine, nextn 1", 0.05, 1.4),
    "prompt": Figure("4 layers of 10B: tokens/s of a prompt over a step's", 0.25, 15, True),
    "int8": Figure("a step after 1,950 tokens: int8 caches over fp32", 0.1, 0.75),
}
LAYERS, CACHED, PROMPT = 4, 1950, 256


def build_and_serve() -> dict[str, float]:
    """Measure a build for 8 users, and the shares of its tokens/s that users get over HTTP."""
    with tempfile.TemporaryDirectory() as folder:
        code = "from mtpbuild.builder.cli import app; app()"
        out = Path(folder) / "engine"
        flags = ["build", "--model", MODEL, "--nextn", str(NEXTN), "--out", str(out)]
        command = [sys.executable, "-c", code, *flags, "--max-batch", "8"]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        server = Server(MODEL, partial(serve_ours, out), out)
        for _ in range(3):
            server.run([1, 8], Work(2, 128))
        shares = {f"http{users}": share for users, share in server.shares()}
    return {"build": seconds} | shares


def load_seconds(engine: str, threads: int) -> float:
    """Return the seconds from a fresh process's first import to its first token: median of five."""
    command = [sys.executable, "-c", FIRST_TOKEN, engine, str(threads)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(5)]
    return statistics.median(float(run.stdout) for run in runs)


def time_steps(
    engine: Engine, tokens: int, prompt: str | list[int]
) -> tuple[list[float], list[float]]:
    """Run one request; return each step's seconds inside the program, and between programs."""
    programs: Any = engine._loaded.loop.programs
    run_step = programs.step
    calls = list[tuple[float, float]]()  # beginnings and ends

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        output = run_step(*arguments)
        calls.append((start, time.perf_counter()))
        return output

    programs.step = timed
    stop = ("\x00never\x00", "\x00ever\x00")
    list(engine.stream(prompt, SamplingParams(tokens, ignore_eos=True, stop=stop)))
    programs.step = run_step
    inside = [end - start for start, end in calls[1:]]
    return inside, [later - end for (_, end), (later, _) in pairwise(calls)]


def host_share(engine: str, threads: int) -> float:
    """Measure the percentage of a step that is spent outside the program."""
    with Engine.load(engine, threads=threads, overlap=False, prefix_cache=False) as loaded:
        time_steps(loaded, 64, "def fibonacci(n):")
        inside, outside = time_steps(loaded, 256, "def fibonacci(n):")
    program, host = statistics.median(inside), statistics.median(outside)
    return 100 * host / (program + host)


def int8_caches(threads: int) -> float:
    """Measure a step after CACHED tokens with int8 caches over one with fp32 caches."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = list[Engine]()
        for caches in ("int8", "float32"):
            out, options = Path(folder) / caches, {"cache_dtype": caches}
            scheme = build_scheme("int8")
            (built,) = build(
                BuildRequest(MODEL, (0,), out=out, scheme=scheme, options=options), WORKBENCH
            )
            loaded = Engine.load(built.folder, threads=threads, overlap=False, prefix_cache=False)
            engines.append(stack.enter_context(loaded))
        tokens, found = list(range(1, CACHED + 1)), list[float]()
        for _ in range(5):
            narrow, wide = (time_steps(engine, 32, tokens)[0] for engine in engines)
            found.append(statistics.median(narrow) / statistics.median(wide))
    return statistics.median(found)


def real_size(threads: int) -> dict[str, float]:
    """Measure the ratios for a few layers of a model of realistic size."""
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder), published(MOE, LAYERS), lambda text: None)
        shop.write_checkpoint()
        engines = shop.build("engines", (0, 1), "--max-seq-len", "512")
        shop.drop_checkpoint()
        step = {"step": decode(24, SHORT, filled=False)}
        asks = {PLAIN: step | {"prompt": prompt(PROMPT)}, DRAFTING: step}
        plain, drafting = (
            ours(name, engine, asks[name], shop.vocabulary).run(threads)
            for name, engine in zip(asks, engines, strict=True)
        )
        size = on_disk(engines[1])
    token, two = (statistics.median(side["step"]["steps"][WARM:]) for side in (plain, drafting))
    return {
        "step": two / token,
        "memory": drafting["step"]["VmHWM"] / size,
        "prompt": PROMPT * token / statistics.median(plain["prompt"]["seconds"]),
    }


def figures(threads: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        asked = Dataset(num_requests=8, output_len=128)
        built = BuildRequest(MODEL, (0, NEXTN, "auto"))
        (report,) = bench(BenchRequest(built, asked, threads=threads, out=Path(folder)))
    engine, (_, row, auto) = report.engines[NEXTN], report.rows
    return {
        "reasoning": row.speedup("reasoning").value,
        "code": row.speedup("code").value,
        "auto": auto.speedup(ALL).value / max(1.0, row.speedup(ALL).value),
        "v": row.overall["verify_cost"],
        "d": row.overall["draft_cost"],
        "host": host_share(engine, threads),
        "load": load_seconds(engine, threads),
        **build_and_serve(),
        **real_size(threads),
        "int8": int8_caches(threads),
    }


def report(found: dict[str, float], recorded: dict[str, Any]) -> tuple[Table, list[str]]:
    """Return the table, and the names of the figures that got worse."""
    then, worse = recorded.get("figures", {}), []
    grid = Table("figure", "now", "recorded", "change", "aim")
    for key, figure in FIGURES.items():
        row = [figure.name, f"{found[key]:.2f} {figure.unit}", "-", "-"]
        if key in then:
            change = f"{100 * (found[key] / then[key] - 1):+.1f} %"
            if figure.worse(found[key], then[key]):
                worse.append(figure.name)
                change = f"[red]{change}[/red]"
            row[2:] = [f"{then[key]:.2f} {figure.unit}", change]
        bound = ">=" if figure.more_is_better else "<="
        grid.add_row(*row, f"{bound} {figure.aim:g}")
    return grid, worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    found = figures(arguments.threads)
    machine = describe_machine(arguments.threads)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    grid, worse = report(found, recorded)
    console = Console(width=max(Console().width, 90))
    console.print(grid)
    if recorded:
        then = recorded["machine"]
        where = f"{then['cpu']} with {', '.join(then['instructions'])}, {then['threads']} threads"
        console.print(f"recorded {then['date']} on {where}")
    if arguments.record:
        RECORDED.parent.mkdir(exist_ok=True)
        content = {"machine": machine, "figures": found}
        RECORDED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return
    if worse:
        sys.exit(f"worse than recorded: {', '.join(worse)}")


if __name__ == "__main__":
    run(main)
