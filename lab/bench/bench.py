"""The benchmark: build, load, measure in turn, compute, write."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages, Watch, ignore
from mtpbuild.lab.bench.engines import EnginePair, build_engines
from mtpbuild.lab.bench.figures import make_rows
from mtpbuild.lab.bench.measure import Contender, measure
from mtpbuild.lab.bench.report import Benchmark, make_json
from mtpbuild.lab.measure.host import describe_machine
from mtpbuild.lab.measure.prompts import Dataset, load_groups, split_groups
from mtpbuild.lab.show.results import check_writable, write_results
from mtpbuild.runtime.checks import in_range
from mtpbuild.runtime.contract.manifest import MAX_BATCH
from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request of `mtpbuild bench`; the engines' max_batch is the largest concurrency."""

    build: BuildRequest
    dataset: Dataset = field(default_factory=Dataset)
    concurrency: tuple[int, ...] = (1,)
    threads: int | None = None
    out: Path = Path("bench_results")
    options: Mapping[str, Any] = field(default_factory=dict)  # the target's options for loading

    def __post_init__(self) -> None:
        object.__setattr__(self, "concurrency", tuple(sorted(set(self.concurrency))))
        for size in self.concurrency:
            in_range(size, 1, MAX_BATCH, "--concurrency")
            if self.max_batch % size:
                raise UsageError(
                    f"--concurrency {size} does not divide {self.max_batch}: groups of the largest "
                    "are split for the others, so that all run the same requests"
                )

    @property
    def max_batch(self) -> int:
        return self.concurrency[-1]


def bench(request: BenchRequest, watch: Watch = ignore) -> list[Benchmark]:
    """Measure, and write bench.json.

    Returns a benchmark per concurrency, smallest first. Raises the errors of builds and engines.
    """
    check_writable(request.out)
    machine = describe_machine(request.threads)

    # 1. Build an engine per nextn, and a verifier for it: an engine that drafts nothing.
    built = build_engines(replace(request.build, max_batch=request.max_batch), Stages(watch))

    with ExitStack() as stack:
        watch("loading the engines")
        contenders = [load_contender(pair, request, stack) for pair in built]

        # 2. Measure: all engines get the same requests in turn, at each concurrency.
        groups = load_groups(request.dataset, contenders[0].engine, request.max_batch)
        measured = {
            size: measure(contenders, split_groups(groups, size), watch)
            for size in request.concurrency
        }

        # 3. Compute the figures.
        settings = {
            "num_requests": len(groups) * request.max_batch,
            "dataset": request.dataset.dataset or "built-in",
            **{k: getattr(request.dataset, k) for k in ("input_len", "output_len")},
            "sampling": asdict(request.dataset.params),
        }
        reports = [
            Benchmark(
                model=contenders[0].engine.manifest.model.name,
                machine=machine,
                settings={"concurrency": size, **settings},
                engines={pair.nextn: str(pair.folder) for pair in built},
                rows=make_rows(contenders, by_nextn),
            )
            for size, by_nextn in measured.items()
        ]
    write_results(request.out, "bench", make_json(reports))
    return reports


def load_contender(built: EnginePair, request: BenchRequest, stack: ExitStack) -> Contender:
    """Return an engine and its verifier; `stack` closes them."""

    def opened(folder: Path) -> Engine:
        loaded = Engine.load(folder, threads=request.threads, prefix_cache=False, **request.options)
        return stack.enter_context(loaded)

    engine = opened(built.folder)
    verifier = None if built.verifier is None else opened(built.verifier)
    return Contender(built.nextn, engine.manifest.build.drafter, engine, verifier)
