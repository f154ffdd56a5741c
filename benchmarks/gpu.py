"""Checks kernels and steps on a GPU, and measures how close they are to the hardware's bounds.

    python benchmarks/gpu.py [--only SECTIONS] [--quick]
    python benchmarks/gpu.py --only slice --tp 8  # one rank's share of R1's layers; 1: the whole
    python benchmarks/gpu.py --only slice --weights nvfp4  # as deepseek-r1-fp4 is; or fp8, bf16
    python benchmarks/gpu.py --only slice --programs FOLDER  # compile once, measure often
    python benchmarks/gpu.py --smoke          # no GPU: tiny shapes in Triton's interpreter
    python benchmarks/gpu.py --only engine --engine engines/tiny_n3_cuda      # don't build one
    python benchmarks/gpu.py --smoke --only engine --engine engines/tiny_n3   # no GPU: any target
    python benchmarks/gpu.py --rows rows.jsonl

Each row is printed as soon as it is measured, and appended to the --rows file, so a run that is cut
short keeps its rows; at the end all rows are printed as one table.

`error` is the largest difference from the op's reference. `bound` is the longer of bytes over
measured memory bandwidth and operations over measured bf16 matrix rate, `share` is bound over time.
Each timed call has its own operands, in one CUDA graph, so that no cache holds data of the previous
call. The rows of attention also show the times of its variant within an AOT plugin's 48 KB and of
PyTorch's SDPA.

`products` and `scaled` (experts) have fp8 and nvfp4 weights, `writes` fill caches, `mixed` is the
acceptance of sampled requests.

`slice` is DeepSeek-R1's step in bf16 with random weights and 4,096 cached tokens. It compiles, as
`mtpbuild build --dtype bfloat16 --tp 8` does, one rank's share of a dense layer, three MoE layers,
the MTP module and the head. Rows show each part as a separate program, then their sum for 61
layers (its `share` is the aim), then the slice's own step in the variants of `engine` below.
`error` is the median token's, from the same program run eagerly. The programs contain the sums
between ranks, but there are no other ranks to sum.

`v4` is the step with nextn 3 of three of DeepSeek-V4-Flash's layers, its module and its head, in
bf16, with random weights and 65,536 cached tokens, in the same variants.

`engine` is a decode step of deepseek-tiny, one request: target onnxruntime on the CPU, PyTorch
eagerly, target inductor launched kernel by kernel, as one CUDA graph, and with overlapping steps.
`error` there counts the tokens that differ from the first row's.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

if "--smoke" in sys.argv:  # Triton reads it at its import
    os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is None:
    sys.exit("benchmarks/gpu.py needs triton: pip install -e '.[triton]'")

import torch
from on_gpu.engine import engine
from on_gpu.kernels import Attention, Experts, acceptance, attention, experts
from on_gpu.machine import Machine, Row, cells, measure_machine
from on_gpu.more_kernels import Product, mixed, products, scaled_experts, writes
from on_gpu.r1 import r1_slice
from on_gpu.slice_step import run_slice
from on_gpu.slices import Slice, check_memory, r1_share, small, small_v4, v4_slice
from rich.console import Console
from rich.table import Table

from mtpbuild.runtime.errors import UsageError


def plans(arguments: argparse.Namespace, machine: Machine) -> dict[str, Iterator[Row]]:
    quick, folder = arguments.quick, arguments.engine
    if arguments.smoke:
        wide = torch.float32
        return {
            "attention": attention(
                [Attention(2, t, s, 4, 40, 8, wide) for t, s in ((1, 30), (4, 70))], machine
            ),
            "acceptance": acceptance([(2, 1, 300), (2, 4, 5000)], machine),
            "experts": experts([Experts(n, 6, 2, 40, 24, wide) for n in (1, 5)], machine),
            "products": products([Product(n, 48, 20, wide) for n in (1, 5)], machine),
            "scaled": scaled_experts([Experts(3, 6, 2, 48, 16, wide)], machine),
            "writes": writes([(2, 3, 20, 24)], machine),
            "mixed": mixed([(2, 3, 300)], machine),
            "slice": r1_slice(small((0, 2)), machine, arguments.compiled),
            "v4": run_slice(small_v4((2,)), machine, arguments.compiled, None, "V4"),
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
        "experts": experts(r1_experts(quick), machine),
        "products": products(
            [
                Product(n, *shape)
                for shape in ((7168, 4608), (2304, 7168), (7168, 512))
                for n in (1, 4, 64)
            ],
            machine,
        ),
        "scaled": scaled_experts(r1_experts(quick), machine),
        "writes": writes([(b, 4, 4096, 576) for b in batches], machine),
        "mixed": mixed([(b, 4, 129280) for b in batches[:2]], machine),
        "slice": r1_rows((0, 3) if quick else (0, 1, 2, 3), arguments, machine),
        "v4": v4_rows(arguments, machine),
        "engine": engine(folder, machine),
    }


def r1_experts(quick: bool) -> list[Experts]:
    """List the shapes of one rank of 8: an eighth of the experts (--ep 8), or of each (--tp 8)."""
    shapes = ((32, 8, 7168, 2048), (256, 8, 7168, 256))
    return [Experts(n, *shape) for shape in shapes for n in ((1, 4) if quick else (1, 4, 16, 64))]


def r1_rows(
    nextn: tuple[int, ...], arguments: argparse.Namespace, machine: Machine
) -> Iterator[Row]:
    case = r1_share(arguments.tp, nextn, arguments.weights)
    name = f"{arguments.weights}-tp{arguments.tp}-nextn{max(nextn)}of{len(nextn)}"
    yield from r1_slice(case, machine, True, keep_programs(arguments, case, name))


def v4_rows(arguments: argparse.Namespace, machine: Machine) -> Iterator[Row]:
    case = v4_slice((3,))
    yield from run_slice(case, machine, True, keep_programs(arguments, case, "v4"), "V4")


def keep_programs(arguments: argparse.Namespace, case: Slice, name: str) -> Path | None:
    """Return where the slice's programs are kept, if they are; raise UsageError if it can't fit."""
    check_memory(case)
    if arguments.programs is None:
        return None
    programs: Path = arguments.programs / name
    programs.mkdir(parents=True, exist_ok=True)
    return programs


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    sections = "attention, acceptance, experts, products, scaled, writes, mixed, slice, v4, engine"
    parser.add_argument("--only", help=f"sections, with commas, of {sections}; default: all")
    parser.add_argument("--engine", type=Path, help="engine of deepseek-tiny; default: builds one")
    parser.add_argument("--rows", type=Path, help="file to append each row to, as JSON")
    kept = "folder in which the slice's compiled programs are kept for the next run"
    parser.add_argument("--programs", type=Path, help=kept)
    parser.add_argument("--tp", type=int, default=8, help="ranks that share R1; default: 8")
    parser.add_argument("--weights", choices=("bf16", "fp8", "nvfp4"), default="bf16")
    compiled = "with --smoke: also compile the slice's programs, for the CPU; takes minutes"
    parser.add_argument("--compiled", action="store_true", help=compiled)
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA GPU; --smoke checks the kernels without one")
    torch.manual_seed(0)
    machine = Machine("cpu") if arguments.smoke else measure_machine()
    plan = plans(arguments, machine)
    names = arguments.only.split(",") if arguments.only else list(plan)
    if "engine" in set(names) - set(plan):
        sys.exit("--smoke builds no engine: --only engine needs --engine")
    unknown = set(names) - set(plan)
    if unknown:
        sys.exit(f"--only {','.join(sorted(unknown))}: expected any of {', '.join(plan)}")
    table = Table("kernel", "shape", "error", "us", "bound us", "share", "beside, us")
    if machine.bandwidth:
        name = torch.cuda.get_device_name()
        figures = f"{machine.bandwidth / 1e12:.2f} TB/s, {machine.rate / 1e12:.0f} TFLOP/s bf16"
        table.title = f"{name}, torch {torch.__version__}: {figures}"
    off = []
    try:
        for name in names:
            for row in plan[name]:
                limit = 1e-3 if arguments.smoke else row.limit
                if not row.error < limit:
                    off.append(f"{row.kernel} is off by {row.error:.2g}, more than {limit:g}")
                table.add_row(*cells(row))
                print(*cells(row), sep=" | ", file=sys.stderr, flush=True)
                if arguments.rows:
                    with arguments.rows.open("a") as file:
                        print(json.dumps({"device": table.title} | asdict(row)), file=file)
    except UsageError as error:
        sys.exit(f"--only slice: {error}")
    finally:  # also show rows measured before a failure
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    if off:
        sys.exit("\n".join(off))


if __name__ == "__main__":
    main()
