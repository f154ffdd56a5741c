"""Times a slice's whole step: eager, compiled, as one CUDA graph, and with overlapping steps.

None of its figures is a speedup of the model, because head and MTP module outweigh few layers.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mtpbuild.builder.program.programs import Program
from mtpbuild.builder.targets import load_target
from mtpbuild.runtime.gpu.torch_cuda import Gpu
from on_gpu.machine import Machine, Row, difference
from on_gpu.parts import State
from on_gpu.slice_bench import Bench, Eagerly, Runner
from on_gpu.slices import Slice

STEPS = 32  # steps of a timed run; each may emit nextn + 1 tokens
OFF = 0.5  # allowed error of a log-probability: on a tie of two experts, either may be chosen
Launch = Callable[[], Callable[[], Tensor]]  # queues a step; the result waits for its tokens


def run_slice(
    case: Slice, machine: Machine, compiled: bool, programs: Path | None, model: str
) -> Iterator[Row]:
    """Yield rows of the slice's step alone; programs: as `r1_slice` has it."""
    sharing = load_target("inductor").compiling() if compiled else nullcontext()
    with tempfile.TemporaryDirectory() as scratch, sharing:
        yield from own_step(Bench(case, machine, compiled, programs or Path(scratch)), model)


def own_step(bench: Bench, model: str = "R1") -> Iterator[Row]:
    """Time each variant; the error compares the first step's log-probabilities with eager ones."""
    nextn = bench.most
    wanted: Tensor | None = None
    first: float | None = None
    for name, launch, state, overlap in variants(bench, bench.step(nextn), nextn):
        beginning = {key: tensor.clone() for key, tensor in state.items()}
        if bench.machine.device == "cuda":
            torch.cuda.synchronize()  # steps use their own stream
        logprobs = launch()()
        wanted = logprobs if wanted is None else wanted
        row = Row(
            f"{model} slice", f"nextn {nextn}, {name}", difference(logprobs, wanted), limit=OFF
        )
        if bench.machine.bandwidth:
            row.microseconds = min(paced(launch, state, beginning, overlap) for _ in range(3))
            first = first or row.microseconds
            row.beside = [f"{first / row.microseconds:.2f}x eager"]
        yield row


def paced(launch: Launch, state: State, beginning: State, overlap: bool) -> float:
    """Return microseconds per step; with overlap the next step is queued before a read."""
    restore(state, beginning)
    begin = time.perf_counter()
    wait = launch()
    for _ in range(STEPS - 1):
        if overlap:
            last, wait = wait, launch()
            last()
        else:
            wait()
            wait = launch()
    wait()
    return 1e6 * (time.perf_counter() - begin) / STEPS


def restore(state: State, beginning: State) -> None:
    for name, tensor in state.items():
        tensor.copy_(beginning[name])
    torch.cuda.synchronize()


def variants(
    bench: Bench, program: Program, nextn: int
) -> Iterator[tuple[str, Launch, State, bool]]:
    """Yield each variant: its name, its step, the step's state, and whether steps overlap."""
    where = program.outputs.index("logprobs") - len(program.state)
    state = bench.state(nextn)
    inputs = operands(program, state)
    yield "eager", partial(at_once, Eagerly(program), inputs, where), state, False
    if not bench.compiled:
        return
    state = bench.state(nextn)
    inputs, runner = operands(program, state), bench.runner(program)
    if bench.machine.device == "cpu":
        yield "engine", partial(at_once, runner, inputs, where), state, False
        return
    gpu = Gpu()
    report = gpu.zeros((1, nextn + 1), "float32")
    page = gpu.pinned(report.nbytes)

    def work() -> None:
        report.copy_(runner.run(inputs)[where])

    def queued(run: Callable[[], object]) -> Callable[[], Tensor]:
        run()
        gpu.copy(report.view(torch.uint8).flatten(), page)
        wait = gpu.mark()

        def read() -> Tensor:
            wait()
            return page.view(torch.float32).clone()[None]

        return read

    yield "engine", partial(queued, partial(gpu.run, work)), state, False
    restore(state, bench.state(nextn))
    graph = gpu.capture(work)
    yield "+ CUDA graph", partial(queued, graph), state, False
    restore(state, bench.state(nextn))
    yield "+ overlap", partial(queued, graph), state, True


def operands(program: Program, state: State) -> list[Tensor]:
    device = state["lengths"].device
    arguments = (tensor.to(device) for tensor in program.arguments.values())
    return [*(state[name] for name in program.state), *arguments]


def at_once(runner: Runner, inputs: list[Tensor], where: int) -> Callable[[], Tensor]:
    """Run a step and wait for it; return a function that gives its log-probabilities.

    where: the index of the output of log-probabilities.
    """
    logprobs = runner.run(inputs)[where].cpu()
    return lambda: logprobs
