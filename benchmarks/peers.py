"""Compares the engine with its alternatives on the same weights, prompts and threads, in turn.

    tools/peers_env.sh                       # once: llama.cpp, in .venv-peers
    python benchmarks/peers.py [--quick] [--threads 2] [--peers NAME,NAME] [--out FOLDER]

Every peer runs in its own process. Each request goes to all of them, one after the other, in
an order that rotates; the others sleep meanwhile. Requests are batch 1, greedy, and ignore EOS.
Missing engines and quantised checkpoints are made first, and GGUF files anew, in
engines/.peers. A peer that fails is listed with its error. It writes peers.json and peers.png.

tokens/s and the time per output token exclude the first token. Load is the time from the first line
of the peer's program until it is ready; memory is the peer's at the end.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from peer_process import PeerProcess
from rich.console import Console
from rich.table import Table
from script import PEERS, convert, run

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.compiler.quantize import QuantizeRequest, quantize
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import make_scheme
from mtpbuild.lab.measure.host import describe_machine
from mtpbuild.lab.measure.prompts import Dataset, load_groups
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.runtime import Engine

FOLDER = Path("engines/.peers")
HERE = Path(__file__).parent / "peer"
REFERENCE = "transformers eager"
CONTEXT, LONG, SHORT = 1536, 1024, 32  # tokens: of a cache, and of prompts for first tokens
PATIENCE = 600  # most seconds for one answer of a peer


@dataclass(frozen=True)
class Peer:
    """A peer: its name, weights' format, worker's command, and the function that makes its file."""

    name: str
    weights: str
    command: tuple[str, ...]
    make: Callable[[], object] = lambda: None


@dataclass
class Measured:
    """A peer's answers and figures; `error` says why it has none."""

    peer: Peer
    error: str = ""
    load_s: float = 0.0
    memory: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by request
    times: dict[int, list[float]] = field(default_factory=dict)
    first: dict[int, list[float]] = field(default_factory=dict)  # prompt length -> seconds

    @property
    def label(self) -> str:
        return f"{self.peer.name}, {self.peer.weights}"

    def per_token(self, requests: Sequence[int]) -> list[float]:
        """Return the seconds per output token of each answered request."""
        spans = [self.times[i] for i in requests if i in self.times]
        return [(times[-1] - times[0]) / (len(times) - 1) for times in spans]

    def rate(self, requests: Sequence[int]) -> float | None:
        """Return tokens per second over all answered requests."""
        each = self.per_token(requests)
        return None if not each else 1 / statistics.fmean(each)


def peers(model: str, threads: int, quick: bool) -> list[Peer]:
    checkpoint = find_model(model).folder
    python, count = sys.executable, str(threads)

    def hugging_face(mode: str) -> Peer:
        command = (python, str(HERE / "hugging_face.py"), str(checkpoint), count, mode)
        return Peer(f"transformers {mode}", "fp32", command)

    def llama_cpp(kind: str) -> Peer:
        path, weights = FOLDER / f"{kind}.gguf", {"f32": "fp32", "q8_0": "int8"}[kind]
        command = (str(PEERS / "python"), str(HERE / "llama_cpp_peer.py"), str(path), count)
        make = partial(convert, checkpoint, path, kind)
        return Peer(f"llama.cpp {kind.upper()}", weights, (*command, str(CONTEXT)), make)

    def ours(nextn: int, weights: str) -> Peer:
        out = FOLDER / f"{weights}_n{nextn}"

        def make() -> None:
            build(BuildRequest(quantised(model, weights), (nextn,), out=out), WORKBENCH)

        command = (python, str(HERE / "ours.py"), str(out), count)
        return Peer(f"mtpbuild nextn {nextn}", weights, command, make)

    fp32 = (0, 3) if quick else (0, 1, 2, 3, 4)
    integers = [ours(n, "int8") for n in (0, 3)]
    if not quick:
        integers += [ours(n, "int4") for n in (0, 3)]
    return [
        hugging_face("eager"),
        hugging_face("mtp"),
        llama_cpp("f32"),
        llama_cpp("q8_0"),
        *(ours(n, "fp32") for n in fp32),
        *integers,
    ]


def quantised(model: str, weights: str) -> str:
    """Return the quantised checkpoint's folder, or the recipe itself for fp32."""
    if weights == "fp32":
        return model
    out = FOLDER / f"checkpoint-{weights}"
    if not out.exists():
        scheme = make_scheme(weights, None, None)
        quantize(QuantizeRequest(model, scheme, out), WORKBENCH)
    return str(out)


def measure(
    wanted: Sequence[Peer],
    threads: int,
    prompts: Sequence[list[int]],
    output: int,
    console: Console,
) -> list[Measured]:
    """Measure all peers, round by round."""
    found = [Measured(peer) for peer in wanted]
    workers = list[tuple[Measured, PeerProcess]]()
    try:
        for each in found:
            console.print(f"loading {each.peer.name}, {each.peer.weights}", style="dim")
            try:
                each.peer.make()
            except Exception as error:
                each.error = f"{error}".splitlines()[0]
                continue
            workers.append((each, PeerProcess(each.peer.command, threads, PATIENCE)))
        short, long = (prompts[0] * LONG)[:SHORT], ([*chain(*prompts)] * LONG)[:LONG]
        for each, worker in workers:
            each.load_s = worker.ready["load_s"] if worker.ready else 0.0
            worker.ask(prompt=short, max_tokens=8)
        for i, prompt in enumerate(prompts):
            console.print(f"request {i + 1} of {len(prompts)}", style="dim")
            turn = i % max(1, len(workers))
            for each, worker in workers[turn:] + workers[:turn]:
                answer = worker.ask(prompt=prompt, max_tokens=output)
                if answer is not None:
                    each.tokens[i], each.times[i] = answer["tokens"], answer["times"]
                    each.memory = answer["memory"]
                for text in (short, long) if i < 5 else ():
                    answer = worker.ask(prompt=text, max_tokens=2)
                    if answer is not None:
                        each.first.setdefault(len(text), []).append(answer["times"][0])
        for each, worker in workers:
            each.error = worker.error
    finally:
        for _, worker in workers:
            worker.close()
    return found


def agreement(one: Measured, other: Measured) -> str:
    """Count the requests whose tokens are equal."""
    both = [i for i in one.tokens if i in other.tokens]
    same = sum(one.tokens[i] == other.tokens[i] for i in both)
    return f"{same}/{len(both)}" if both else "-"


def table(found: Sequence[Measured], kinds: dict[str, list[int]]) -> Table:
    columns = ["peer", *(f"{kind}\ntokens/s" for kind in kinds), "TPOT, ms\np50  p90"]
    columns += [f"TTFT, ms\n{SHORT} {LONG}", "load\ns", "memory\nMB", "same\ntext"]
    grid = Table(title="batch 1, greedy")
    for i, column in enumerate(columns):
        grid.add_column(column, justify="right" if i else "left", no_wrap=True)
    reference = next((m for m in found if m.peer.name == REFERENCE), found[0])
    every = [i for requests in kinds.values() for i in requests]
    for each in found:
        if each.error:
            grid.add_row(each.label, *("failed" for _ in kinds))
            continue
        times = sorted(1e3 * s for s in each.per_token(every))
        p90 = times[min(len(times) - 1, int(0.9 * len(times)))]
        first = (f"{1e3 * statistics.median(each.first[n]):.0f}" for n in (SHORT, LONG))
        grid.add_row(
            each.label,
            *(f"{each.rate(requests) or 0:.1f}" for requests in kinds.values()),
            f"{statistics.median(times):.2f}  {p90:.2f}",
            " ".join(first),
            f"{each.load_s:.2f}",
            f"{(each.memory or 0) / 1e6:.0f}",
            agreement(each, reference),
        )
    return grid


def draw(found: Sequence[Measured], kinds: dict[str, list[int]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [m for m in found if not m.error]
    figure, axes = pyplot.subplots(figsize=(8, 0.5 + 0.45 * len(shown)), layout="constrained")
    height = 0.8 / len(kinds)
    for k, (kind, requests) in enumerate(kinds.items()):
        places = [i + height * (k + 0.5) - 0.4 for i in range(len(shown))]
        values = [m.rate(requests) or 0 for m in shown]
        bars = axes.barh(places, values, height * 0.9, label=kind)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axes.set_yticks(range(len(shown)), [m.label for m in shown])
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s of one stream, greedy")
    figure.legend(loc="outside upper right", ncols=len(kinds), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-tiny")
    parser.add_argument("--quick", action="store_true", help="fewer peers, requests and tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, help="requests of each kind")
    parser.add_argument("--output-len", type=int)
    parser.add_argument("--peers", help="peers to measure, with commas, such as 'mtpbuild nextn 3'")
    parser.add_argument("--out", type=Path, default=Path("bench_results"))
    arguments = parser.parse_args()
    console = Console(width=max(Console().width, 112))
    wanted = peers(arguments.model, arguments.threads, arguments.quick)
    if arguments.peers:
        names = arguments.peers.split(",")
        unknown = sorted(set(names) - {peer.name for peer in wanted})
        if unknown:
            known = ", ".join(dict.fromkeys(peer.name for peer in wanted))
            sys.exit(f"--peers {unknown[0]}: expected any of {known}")
        wanted = [peer for peer in wanted if peer.name in names]
    FOLDER.mkdir(parents=True, exist_ok=True)
    each, output = (3, 96) if arguments.quick else (10, 256)
    each, output = arguments.requests or each, arguments.output_len or output
    build(BuildRequest(arguments.model, (0,), out=FOLDER / "fp32_n0"), WORKBENCH)
    with Engine.load(FOLDER / "fp32_n0", prefix_cache=False) as engine:
        groups = load_groups(Dataset(num_requests=2 * each, output_len=output), engine, 1)
    asked = [prompt for group in groups for prompt in group]
    kinds: dict[str, list[int]] = {}
    for i, prompt in enumerate(asked):
        kinds.setdefault(prompt.kind, []).append(i)
    found = measure(wanted, arguments.threads, [p.token_ids for p in asked], output, console)
    console.print(table(found, kinds))
    for one in found:
        if one.error:
            console.print(f"{one.label}: {one.error}", style="red", markup=False)
    arguments.out.mkdir(parents=True, exist_ok=True)
    settings = {"requests": len(asked), "output_len": output, "kinds": kinds}
    content = {
        "machine": describe_machine(arguments.threads),
        "settings": settings,
        "peers": [
            {k: v for k, v in asdict(m).items() if k != "peer"}
            | {"name": m.peer.name, "weights": m.peer.weights}
            for m in found
        ],
    }
    (arguments.out / "peers.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    draw(found, kinds, arguments.out / "peers.png")


if __name__ == "__main__":
    run(main)
