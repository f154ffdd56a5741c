"""The benchmark: build, load, measure in turn, compute, write."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mtpbuild.builder.bench.dataset import Asked, load_groups, split
from mtpbuild.builder.bench.engines import Built, Wanted, build_engines
from mtpbuild.builder.bench.figures import rows
from mtpbuild.builder.bench.machine import describe_machine
from mtpbuild.builder.bench.measure import Contender, measure
from mtpbuild.builder.bench.picture import draw, draw_batches, draw_steps
from mtpbuild.builder.bench.report import Benchmark, to_batches_json, to_json, to_rows
from mtpbuild.builder.show.picture import missing
from mtpbuild.builder.show.results import prepare, write_csv, write_json
from mtpbuild.builder.stages import Stages
from mtpbuild.runtime.engine import Engine

OUT = Path("bench_results")
JSON, CSV = "bench.json", "bench.csv"
PICTURE, STEPS_PICTURE, BATCHES_PICTURE = "bench.png", "bench_steps.png", "bench_batches.png"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The flags of `mtpbuild bench`."""

    wanted: Wanted
    asked: Asked = field(default_factory=Asked)
    threads: int | None = None
    out: Path = OUT
    options: Mapping[str, Any] = field(default_factory=dict)  # the target's options for loading


def bench(
    request: BenchRequest, watch: Callable[[str], None] = lambda stage: None
) -> list[Benchmark]:
    """Measure, and write bench.json, bench.csv and the pictures.

    Returns a benchmark per concurrency, smallest first. Raises the errors of builds and engines.
    """
    prepare(request.out)
    machine = describe_machine(request.threads)

    # 1. Build an engine per nextn, and a verifier for it: an engine that drafts nothing.
    built = build_engines(request.wanted, Stages(watch))

    with ExitStack() as stack:
        watch("loading the engines")
        contenders = [load(one, request, stack) for one in built]

        # 2. Measure: all engines get the same requests in turn, at each concurrency.
        groups = load_groups(request.asked, contenders[0].engine, request.wanted.max_batch)
        total = len(groups) * request.wanted.max_batch
        measured = {
            size: measure(contenders, split(groups, size), partial(tell, watch, size, total))
            for size in request.wanted.concurrency
        }

        # 3. Compute the figures.
        settings = {
            "num_requests": total,
            "dataset": request.asked.dataset or "built-in",
            **{k: getattr(request.asked, k) for k in ("input_len", "output_len")},
            "sampling": asdict(request.asked.params),
        }
        reports = [
            Benchmark(
                model=contenders[0].engine.manifest.model.name,
                machine=machine,
                settings={"concurrency": size, **settings},
                engines={one.nextn: str(one.folder) for one in built},
                rows=rows(contenders, by_nextn),
                measured=by_nextn,
            )
            for size, by_nextn in measured.items()
        ]
    write(reports, request.out)
    return reports


def tell(watch: Callable[[str], None], size: int, total: int, done: int) -> None:
    at_once = f", {size} at once" if size > 1 else ""
    watch(f"request {done * size + 1} of {total}{at_once}")


def load(built: Built, request: BenchRequest, stack: ExitStack) -> Contender:
    """Return an engine and its verifier; `stack` closes them."""

    def opened(folder: Path) -> Engine:
        loaded = Engine.load(folder, threads=request.threads, **request.options)
        return stack.enter_context(loaded)

    engine = opened(built.folder)
    verifier = None if built.verifier is None else opened(built.verifier)
    return Contender(built.nextn, engine.manifest.build.drafter, engine, verifier)


def write(reports: Sequence[Benchmark], out: Path) -> None:
    """Write the figures and the pictures of the first concurrency.

    With several concurrencies, a further picture compares them. Without matplotlib there are no
    pictures.
    """
    first, several = reports[0], len(reports) > 1
    write_json(out / JSON, to_batches_json(reports) if several else to_json(first))
    write_csv(out / CSV, to_rows(reports))
    if missing():
        return
    m = first.machine
    note = f"{m['cpu']}, {m['cores']} cores; {m['command']}"
    draw(first.rows, out / PICTURE, f"{first.model}: what MTP gives", note)
    draw_steps(first.rows, out / STEPS_PICTURE, f"{first.model}: step by step", note)
    if several:
        draw_batches(reports, out / BATCHES_PICTURE, note)
