"""The Triton kernels on a GPU: correct, and how far from what the memory and tensor cores allow.

    python benchmarks/gpu.py [--only attention,acceptance,experts,engine] [--quick]
    python benchmarks/gpu.py --smoke          # no GPU: tiny shapes in Triton's interpreter
    python benchmarks/gpu.py --only engine --engine engines/tiny_n3_cuda      # not built anew
    python benchmarks/gpu.py --smoke --only engine --engine engines/tiny_n3   # no GPU: any target

One table. `error` is the largest difference from the op's reference. `bound` is the longer of bytes
over measured copy bandwidth and operations over measured bf16 matrix rate, `share` is bound over
time. Each timed call has operands of its own, in one CUDA graph, so that nothing stays in a cache
from the call before. Beside the attention: the variant within an AOT plugin's 48 KB, PyTorch's
SDPA, and FlashMLA and FlashInfer where they can be imported.

`engine` is a decode step of deepseek-tiny, one request: PyTorch eagerly, target inductor launched
kernel by kernel, as one CUDA graph, and with overlapping steps. `error` there counts the tokens
that differ from the eager ones.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if "--smoke" in sys.argv:  # Triton asks when it is imported
    os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is None:
    sys.exit("benchmarks/gpu.py needs triton: pip install -e '.[triton]'")

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mtpbuild.builder.compiler import load_model
from mtpbuild.builder.model.config import load_config
from mtpbuild.builder.pipeline import BuildRequest, build
from mtpbuild.builder.plan import Plan, state_specs
from mtpbuild.builder.program import make_programs
from mtpbuild.builder.recipe import find_model
from mtpbuild.plugins import accept_rewind, mla_attention, moe, moe_route
from mtpbuild.plugins.accept_rewind.triton import accept_rewind_triton
from mtpbuild.plugins.launch import AOT_SHARED, shared_memory
from mtpbuild.plugins.mla_attention.triton import mla_launches
from mtpbuild.plugins.moe.triton import moe_route_triton, moe_triton
from mtpbuild.runtime import Engine, Manifest, SamplingParams
from mtpbuild.runtime.manifest import read_manifest
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.base import GREEDY, Bools, Controls, Ints, Programs, StepOutput
from mtpbuild.runtime.tokenizer import load_tokenizer

Call = Callable[[], Any]
RANK, ROPE, SCALE = 512, 64, 0.1352337789
COLD = 256 << 20  # bytes that pass through a GPU's cache before a call's operands are used again
PROMPT = "def fibonacci(n):"


@dataclass(frozen=True)
class Machine:
    """What this GPU was measured to do; zeros where nothing is timed."""

    device: str
    bandwidth: float = 0.0  # bytes per second, copying 1 GiB
    rate: float = 0.0  # operations per second of a bf16 product of 8,192


@dataclass
class Row:
    kernel: str
    shape: str
    error: float
    microseconds: float | None = None
    bound: float | None = None
    beside: list[str] = field(default_factory=list)  # what others take


def measure_machine() -> Machine:
    data = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(data)
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    copying = microseconds([lambda: other.copy_(data)]) / 1e6
    multiplying = microseconds([lambda: square @ square]) / 1e6
    return Machine("cuda", 2 * data.numel() / copying, 2 * 8192**3 / multiplying)


def microseconds(calls: Sequence[Call]) -> float:
    """Per call, of all calls in one CUDA graph; the median of 7 replays."""
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times) / len(calls)


def repeats(nbytes: int) -> int:
    """Sets of operands, so that a set has left the cache when its turn comes again."""
    return max(2, min(64, COLD // nbytes + 1))


def difference(got: Tensor, wanted: Tensor) -> float:
    return float((got.float().cpu() - wanted.float().cpu()).abs().max())


@dataclass(frozen=True)
class Attention:
    batch: int
    tokens: int
    context: int
    heads: int
    rank: int = RANK
    rope: int = ROPE
    dtype: torch.dtype = torch.bfloat16

    def operands(self, device: str) -> tuple[Tensor, ...]:
        """q, cache, fresh, base, first: every slot has `context` committed rows."""
        B, T, C = self.batch, self.tokens, self.rank + self.rope
        shapes = (B, self.heads, T, C), (B, 1, self.context, C), (B, 1, T, C)
        floats = (torch.randn(shape, device=device, dtype=self.dtype) for shape in shapes)
        base = torch.full((B,), self.context, device=device)
        return *floats, base, torch.zeros_like(base)

    def kernel(self, operands: tuple[Tensor, ...], shared: int) -> Tensor:
        q, cache, fresh, base, first = operands
        launches = mla_launches(q, cache, fresh, base, first, SCALE, self.rank, shared=shared)
        for launch in launches:
            launch.run()
        return launches[-1].outputs[0]

    def bound(self, machine: Machine) -> float:
        """Microseconds: the cache read once, and both products."""
        width, rows = self.rank + self.rope, self.batch * (self.context + self.tokens)
        queries = self.batch * self.heads * self.tokens
        nbytes = (rows * width + queries * (width + self.rank)) * self.dtype.itemsize
        operations = 2 * self.heads * self.tokens * rows * (width + self.rank)
        return 1e6 * max(nbytes / machine.bandwidth, operations / machine.rate)


def attention(cases: Sequence[Attention], machine: Machine) -> Iterator[Row]:
    for case in cases:
        row = Row(
            "mla_attention", f"B {case.batch} T {case.tokens} S {case.context} H {case.heads}", 0
        )
        probe = replace(case, batch=1, context=min(case.context, 1024)).operands(machine.device)
        shared = shared_memory(probe[0].device)
        exact = (x.cpu().float() if x.is_floating_point() else x.cpu() for x in probe)
        wanted = mla_attention(*exact, SCALE, case.rank)
        row.error = difference(case.kernel(probe, shared), wanted)
        if machine.bandwidth:
            nbytes = probe[1][0, 0, 0].nbytes * case.context * case.batch
            sets = [case.operands("cuda") for _ in range(repeats(nbytes))]
            row.microseconds = microseconds([partial(case.kernel, s, shared) for s in sets])
            row.bound = case.bound(machine)
            aot = microseconds([partial(case.kernel, s, AOT_SHARED) for s in sets])
            row.beside = [f"AOT {aot:.1f}", *others(case, sets)]
        yield row


def others(case: Attention, sets: Sequence[tuple[Tensor, ...]]) -> Iterator[str]:
    """What other kernels take for the same rows; a failure is shown, not hidden."""
    for name, prepare in (("SDPA", sdpa), ("FlashMLA", flash_mla), ("FlashInfer", flashinfer)):
        try:
            yield f"{name} {microseconds([prepare(case, *operands) for operands in sets]):.1f}"
        except ImportError:
            continue
        except Exception as error:  # theirs, of any kind: out of memory, a shape
            yield f"{name} failed ({type(error).__name__})"


def sdpa(case: Attention, q: Tensor, cache: Tensor, *rest: Tensor) -> Call:
    """All rows seen by all tokens: the mask would only cost it more."""
    k, v = cache.expand(-1, case.heads, -1, -1), cache[..., : case.rank]
    v = v.expand(-1, case.heads, -1, -1)
    return lambda: F.scaled_dot_product_attention(q, k, v, scale=SCALE)


def flash_mla(
    case: Attention, q: Tensor, cache: Tensor, fresh: Tensor, base: Tensor, _: Any
) -> Call:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    pages, q = cache.view(-1, 64, 1, cache.shape[-1]), q.transpose(1, 2).contiguous()
    table = torch.arange(pages.shape[0], dtype=torch.int32, device="cuda").view(case.batch, -1)
    lengths = base.int()
    plan, splits = get_mla_metadata(lengths, case.tokens * case.heads, 1)
    return lambda: flash_mla_with_kvcache(
        q, pages, table, lengths, case.rank, plan, splits, SCALE, causal=True
    )


def flashinfer(
    case: Attention, q: Tensor, cache: Tensor, fresh: Tensor, base: Tensor, _: Any
) -> Call:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    B, T = case.batch, case.tokens
    pages = cache.view(-1, 64, cache.shape[-1])
    q = q.transpose(1, 2).reshape(B * T, case.heads, -1)
    count = torch.arange(B + 1, dtype=torch.int32, device="cuda")
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.int8, device="cuda"))
    wrapper.plan(
        count * T,
        count * (case.context // 64),
        torch.arange(pages.shape[0], dtype=torch.int32, device="cuda"),
        base.int(),
        case.heads,
        case.rank,
        case.rope,
        64,
        True,
        SCALE,
        q.dtype,
        cache.dtype,
    )
    halves = (
        q[..., : case.rank],
        q[..., case.rank :],
        pages[..., : case.rank],
        pages[..., case.rank :],
    )
    parts = [half.contiguous() for half in halves]
    return lambda: wrapper.run(*parts)


def acceptance(cases: Sequence[tuple[int, int, int]], machine: Machine) -> Iterator[Row]:
    """(batch, tokens, vocabulary): strict and greedy; its bound is reading the logits once."""
    for B, T, V in cases:
        zero = torch.zeros(B, dtype=torch.int64)
        operands = torch.randn(B, T, V), torch.zeros(B, T, dtype=torch.int64), zero + T - 1
        wanted = accept_rewind(*operands, zero, zero == 0)

        def moved(zero: Tensor = zero, operands: Any = operands) -> tuple[Tensor, ...]:
            return tuple(x.to(machine.device) for x in (*operands, zero, zero == 0))

        got = accept_rewind_triton(*moved())
        error = max(difference(a, b) for a, b in zip(got, wanted, strict=True))
        row = Row("accept_rewind", f"B {B} T {T} V {V}", error)
        if machine.bandwidth:
            nbytes = 4 * B * T * V
            sets = [moved() for _ in range(repeats(nbytes))]
            row.microseconds = microseconds([partial(accept_rewind_triton, *s) for s in sets])
            row.bound = 1e6 * nbytes / machine.bandwidth
        yield row


@dataclass(frozen=True)
class Experts:
    """A rank's experts; every one of them may be chosen."""

    tokens: int
    experts: int
    chosen: int
    hidden: int
    inner: int
    dtype: torch.dtype = torch.bfloat16


def experts(cases: Sequence[Experts], machine: Machine) -> Iterator[Row]:
    """The bound is reading the chosen experts' weights once."""
    for c in cases:
        device = machine.device
        scores = torch.randn(c.tokens, c.experts, device=device)
        bias = torch.zeros(c.experts, device=device)
        weights, ids = moe_route_triton(scores, bias, 1, 1, c.chosen, True, 2.5)
        plain = moe_route(scores.cpu(), bias.cpu(), 1, 1, c.chosen, True, 2.5)
        assert torch.equal(ids.cpu(), plain[1]), "moe_route chose other experts"
        x = torch.randn(c.tokens, c.hidden, device=device, dtype=c.dtype)
        up = torch.randn(c.experts, c.hidden, 2 * c.inner, device=device, dtype=c.dtype)
        down = torch.randn(c.experts, c.inner, c.hidden, device=device, dtype=c.dtype)
        up, down = up / c.hidden**0.5, down / c.inner**0.5
        first = ids[0].long()
        own = (m[first].cpu().float() for m in (up, down))
        numbers = torch.arange(c.chosen, dtype=torch.int32)[None]
        wanted = moe(x[:1].cpu().float(), weights[:1].cpu(), numbers, *own)
        error = difference(moe_triton(x, weights, ids, up, down)[:1], wanted)
        row = Row("moe", f"N {c.tokens} of {c.experts} x {c.hidden} x {c.inner}", error)
        if machine.bandwidth:
            each = (up[0].numel() + down[0].numel()) * c.dtype.itemsize
            nbytes = each * int(ids.unique().numel())
            sets = [
                (up, down),
                *((up.clone(), down.clone()) for _ in range(min(2, COLD // nbytes))),
            ]
            row.microseconds = microseconds(
                [partial(moe_triton, x, weights, ids, *s) for s in sets]
            )
            row.bound = 1e6 * nbytes / machine.bandwidth
        yield row


class Eager:
    """The step program, one greedy slot, as PyTorch runs it: an operator at a time."""

    def __init__(self, manifest: Manifest, device: str) -> None:
        built, folder = manifest.build, find_model(manifest.model.name).folder
        config = load_config(folder)
        sizes = built.max_batch, built.max_seq_len, built.prefill_chunk
        plan = Plan(config, built.nextn, built.drafter, *sizes)
        model = load_model(folder, config).to(device)
        self.lookahead, self.device = plan.lookahead, device
        self.prefill_program, self.step_program, _ = make_programs(plan, model)
        self.state = {
            s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device=device)
            for s in state_specs(plan)
        }

    @torch.no_grad()
    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        given = torch.from_numpy(tokens)[None].to(self.device)
        chunk = given.shape[1] - self.lookahead
        state = {name: self.state[name] for name in self.prefill_program.state}
        ahead = (given[:, chunk:],) if self.lookahead else ()
        first = torch.tensor([start], device=self.device)
        self.state |= self.prefill_program.module(state, given[:, :chunk], first, *ahead)

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        assert controls.plain, "greedy alone"
        self.state["lengths"][:], self.state["num_drafts"][:] = length, 0
        self.state["window"][:, 0] = newest

    def move(self, source: int, target: int) -> None:
        raise AssertionError("there is one slot")

    @torch.no_grad()
    def step(self, active: Bools, rows: int) -> StepOutput:
        judged = {name: self.state[name] for name in ("window", "num_drafts")}
        ready = torch.from_numpy(active).to(self.device)
        self.state, outputs = self.step_program.module(self.state, ready)
        arrays = {name: tensor.cpu().numpy() for name, tensor in (judged | outputs).items()}
        return StepOutput(**arrays)


def engine(folder: Path | None, machine: Machine) -> Iterator[Row]:
    """folder: an engine of deepseek-tiny for one request; None builds it for this GPU."""
    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            asked = BuildRequest("deepseek-tiny", (3,), target="inductor", device="cuda")
            folder = build(replace(asked, out=Path(scratch) / "engine"))[0].folder
        manifest = read_manifest(folder)
        if manifest.build.max_batch > 1:
            sys.exit(f"--engine {folder}: built for {manifest.build.max_batch} requests, not one")
        tokenizer = load_tokenizer(folder, manifest)
        wanted: list[int] = []
        first = None
        for name, make, overlap in variants(folder, manifest, machine):
            with Engine(make(), manifest, tokenizer, overlap=overlap) as loaded:
                tokens, each = decode(loaded, machine)
            wanted, first = wanted or tokens, first or each
            wrong = sum(a != b for a, b in zip(tokens, wanted, strict=True))
            row = Row("step", f"nextn {manifest.build.nextn}, {name}", wrong, each)
            row.beside = [f"{first / each:.2f}x eager"]
            yield row


def variants(
    folder: Path, manifest: Manifest, machine: Machine
) -> Iterator[tuple[str, Callable[[], Programs], bool]]:
    """Name, programs, and whether steps overlap."""
    yield "eager", partial(Eager, manifest, machine.device), False
    if machine.device == "cpu":
        yield "engine", partial(load_programs, folder, manifest), False
        return
    from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms
    from mtpbuild.runtime.programs.torch_cuda import Gpu

    def load(graphs: bool) -> Programs:
        return CudaPrograms(folder, manifest, Gpu(), graphs=graphs)

    yield "engine", partial(load, graphs=False), False
    yield "+ CUDA graph", partial(load, graphs=True), False
    yield "+ overlap", partial(load, graphs=True), True


def decode(loaded: Engine, machine: Machine) -> tuple[list[int], float]:
    """A prompt's tokens, and the microseconds of a step behind the first one: the best of some."""
    count, repeats = (12, 1) if machine.device == "cpu" else (256, 3)
    best, tokens = float("inf"), list[int]()
    for _ in range(repeats):
        result = loaded.generate(PROMPT, SamplingParams(max_tokens=count, ignore_eos=True))
        tokens, metrics = result.token_ids, result.metrics
        assert metrics.tpot_s is not None
        seconds = metrics.tpot_s * (len(tokens) - 1)
        best = min(best, 1e6 * seconds / (metrics.speculative_decoding.num_spec_steps - 1))
    return tokens, best


def plans(
    smoke: bool, quick: bool, folder: Path | None, machine: Machine
) -> dict[str, Iterator[Row]]:
    if smoke:
        wide = torch.float32
        return {
            "attention": attention(
                [Attention(2, t, s, 4, 40, 8, wide) for t, s in ((1, 30), (4, 70))], machine
            ),
            "acceptance": acceptance([(2, 1, 300), (2, 4, 5000)], machine),
            "experts": experts([Experts(n, 6, 2, 40, 24, wide) for n in (1, 5)], machine),
            **({"engine": engine(folder, machine)} if folder else {}),
        }
    batches, contexts = ((1, 16), (1024, 16384)) if quick else ((1, 4, 16, 64), (1024, 8192, 65536))
    return {
        "attention": attention(
            [
                Attention(b, t, s, h)
                for h in (16, 128)
                for b in batches
                for s in contexts
                for t in ((1, 4) if quick else (1, 2, 4))
            ],
            machine,
        ),
        "acceptance": acceptance([(b, t, 129280) for b in batches for t in (1, 4)], machine),
        "experts": experts([Experts(n, 32, 8, 7168, 2048) for n in (1, 4, 16, 64)], machine),
        "engine": engine(folder, machine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--only", help="of attention, acceptance, experts, engine; default: all")
    parser.add_argument("--engine", type=Path, help="of deepseek-tiny; default: built for this GPU")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA GPU; --smoke checks the kernels without one")
    torch.manual_seed(0)
    machine = Machine("cpu") if arguments.smoke else measure_machine()
    plan = plans(arguments.smoke, arguments.quick, arguments.engine, machine)
    names = arguments.only.split(",") if arguments.only else list(plan)
    if "engine" in set(names) - set(plan):
        sys.exit("--smoke has nothing to build for: --only engine needs --engine")
    unknown = set(names) - set(plan)
    if unknown:
        sys.exit(f"--only {','.join(sorted(unknown))}: expected any of {', '.join(plan)}")
    table = Table("kernel", "shape", "error", "us", "bound us", "share", "beside, us")
    worst = 0.0
    for name in names:
        for row in plan[name]:
            worst = max(worst, row.error)
            table.add_row(*cells(row))
    if machine.bandwidth:
        name = torch.cuda.get_device_name()
        figures = f"{machine.bandwidth / 1e12:.2f} TB/s, {machine.rate / 1e12:.0f} TFLOP/s bf16"
        table.title = f"{name}, torch {torch.__version__}: {figures}"
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    limit = 1e-3 if arguments.smoke else 5e-2
    if not worst < limit:
        sys.exit(f"a kernel is off by {worst:.2g}, more than {limit:g}")


def cells(row: Row) -> list[str]:
    figures = ["-", "-", "-"]
    if row.microseconds is not None:
        figures[0] = f"{row.microseconds:.1f}"
        if row.bound is not None:
            figures[1:] = f"{row.bound:.1f}", f"{row.bound / row.microseconds:.0%}"
    beside = ", ".join(row.beside) or "-"
    return [row.kernel, row.shape, f"{row.error:.1e}", *figures, beside]


if __name__ == "__main__":
    main()
