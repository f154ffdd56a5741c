"""Runs commands of under 8 minutes each on a GPU, in the order in which to read the results.

    python benchmarks/gpu_run.py [--out gpu_run] [NAME ..]  # by default all
        python benchmarks/gpu_run.py --smoke       # no GPU: runs small versions of all commands

    preflight  versions, packages; one compiled part loaded, compared, captured
    random     kernels on random shapes, in bfloat16 too; 2 minutes
    rtx        TensorRT-RTX's answer for this GPU: its message, or an engine's tokens; 3 minutes
    provider   onnxruntime --provider cuda: the tokens of the CPU's engine; 5 minutes
    soak       requests at once, some cancelled, prefix cache, CUDA graphs; 2 minutes
    kernels    tests/gpu/test_kernels.py: each Triton kernel against its reference
    rooflines  each kernel's time and its bound, R1's shapes, fp8 and nvfp4 too
    tiny       deepseek-tiny: eager, engine, graph, overlap; tokens of the CPU's engine
    slice      a rank's share of R1's layers, part by part
    v4         a step of three of DeepSeek-V4-Flash's layers after 65,536 tokens
    nccl       a world of one: sums in a compiled program, launched, then captured
    tensorrt   tests/gpu/test_tensorrt.py: deepseek-tiny, the tokens of the CPU's engine

Each writes OUT/N-NAME.json (its status, command and rows) and OUT/N-NAME.txt (its output), even if
it is cut short. A status is `passed` only if all checks of the command ran on a GPU and were right.
The exit code is 1 if a command failed; after a failed preflight no other command is run.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from runpy import run_module, run_path
from typing import IO, Any

from on_gpu.checks import FAILED, NO_GPU, NOTED, ON_CPU, PASSED
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
LIMIT = 470  # seconds per command, which may have to fit into 8 minutes of GPU time
RANDOM = "mla_attention or matmul_scaled or test_moe or latents or experts"
KERNELS = "attention,acceptance,experts,products,scaled,writes,mixed"
GPU = ("benchmarks/gpu.py",)
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Command:
    """A command: its arguments on a GPU and without one, and the reader of its rows."""

    name: str
    on_gpu: tuple[str, ...]
    smoke: tuple[str, ...] | None  # None: it can't run without a GPU
    read: Callable[[Path], Rows]
    limit: int = LIMIT  # seconds


def checked(file: Path) -> Rows:
    """Read the rows that `on_gpu/checks.py` has written."""
    return lines_of(file)


def measured(file: Path) -> Rows:
    """Read rows of `benchmarks/gpu.py`; a row passes if it is correct and was timed on a GPU."""
    found = lines_of(file)
    for row in found:
        right = row["error"] < row["limit"]
        row["status"] = (PASSED if row["microseconds"] else ON_CPU) if right else FAILED
        row["what"] = f"{row['kernel']} {row['shape']}"
        row["detail"] = figures(row)
    return found


def figures(row: dict[str, Any]) -> str:
    parts = [f"error {row['error']:.1e}"]
    if row["microseconds"]:
        parts.append(f"{row['microseconds']:.1f} us")
        if row["bound"]:
            parts.append(f"{row['bound'] / row['microseconds']:.0%} of the bound")
    return ", ".join([*parts, *row["beside"]])


def tested(file: Path) -> Rows:
    """Read pytest's report into a row per test function."""
    if not file.exists():
        return []
    found = dict[str, Counter[str]]()
    why = dict[str, str]()
    for case in ET.parse(file).iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        wrong = case.find("failure") if case.find("error") is None else case.find("error")
        skipped = case.find("skipped")
        status = FAILED if wrong is not None else PASSED
        if skipped is not None:
            reason = skipped.get("message", "")
            status = NO_GPU if "no CUDA device" in reason else f"skipped: {reason}"
        if wrong is not None:
            why[name] = (wrong.get("message") or "").partition("\n")[0]
        found.setdefault(name, Counter())[status] += 1
    return [
        {
            "what": name,
            "status": min(counts, key=severity),
            "detail": ", ".join(f"{n} {s}" for s, n in counts.items())
            + (f": {why[name]}" if name in why else ""),
        }
        for name, counts in found.items()
    ]


def lines_of(file: Path) -> Rows:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def severity(status: str) -> int:
    """Return the rank of a status, the worst first: failed, left out, ran on the CPU, passed."""
    order = (FAILED, NO_GPU, "skipped", ON_CPU, PASSED, NOTED)
    return next(i for i, begins in enumerate(order) if status.startswith(begins))


def commands(engine: Path | None) -> list[Command]:
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-m", "gpu")
    tests, tensorrt, provider = (
        (*pytest, f"tests/gpu/test_{name}.py", "--junitxml", "ROWS")
        for name in ("kernels", "tensorrt", "onnxruntime")
    )
    preflight, nccl, rtx, soak = (
        f"benchmarks/on_gpu/{name}.py" for name in ("preflight", "nccl_one", "rtx", "soak")
    )
    random = (*tests, "-k", RANDOM)
    rows, smoke = ("--rows", "ROWS"), "--smoke"
    soak_smoke = (soak, smoke, "--seconds", "1", *(("--engine", str(engine)) if engine else ()))
    tiny = (*GPU, smoke, "--only", "engine", "--engine", str(engine), *rows)
    return [
        Command("preflight", (preflight, *rows), (preflight, smoke, *rows), checked),
        Command("random", (*random, "-n", "12"), (*random, "-n", "0"), tested, 120),
        Command("rtx", (rtx, *rows), (rtx, smoke, *rows), checked, 180),
        Command("provider", (*provider, "-n", "0"), (*provider, "-n", "0"), tested, 300),
        Command("soak", (soak, *rows), (*soak_smoke, *rows), checked, 120),
        Command("kernels", (*tests, "-n", "12"), (*tests, "-n", "0"), tested),
        Command(
            "rooflines",
            (*GPU, "--only", KERNELS, "--quick", *rows),
            (*GPU, smoke, "--only", KERNELS, *rows),
            measured,
        ),
        Command("tiny", (*GPU, "--only", "engine", *rows), tiny if engine else None, measured),
        Command(
            "slice",
            (*GPU, "--only", "slice", "--quick", *rows),
            (*GPU, smoke, "--only", "slice", *rows),
            measured,
        ),
        Command(
            "v4",
            (*GPU, "--only", "v4", *rows),
            (*GPU, smoke, "--only", "v4", *rows),
            measured,
        ),
        Command("nccl", (nccl, *rows), (nccl, smoke, *rows), checked),
        Command("tensorrt", (*tensorrt, "-n", "0"), None, tested),  # skipped without its packages
    ]


def run(command: Command, number: int, out: Path, smoke: bool) -> dict[str, Any]:
    """Run a command and return its rows and status, even if it crashed or hung."""
    stem = out / f"{number}-{command.name}"
    asked = command.smoke if smoke else command.on_gpu
    found: dict[str, Any] = {"name": command.name, "command": asked, "seconds": 0.0, "rows": []}
    if asked is None:
        return found | {"status": NO_GPU}
    file = stem.with_suffix(".rows")
    file.unlink(missing_ok=True)
    given = [str(file) if word == "ROWS" else word for word in asked]
    begin, why = time.monotonic(), ""
    with stem.with_suffix(".txt").open("w") as output:
        try:
            code = (walk_through if smoke else start)(given, output, command.limit)
            why = f"exit code {code}" if code else ""
        except TimeoutError:
            why = f"cut short after {command.limit} s"
    rows = command.read(file)
    file.unlink(missing_ok=True)
    if why and not any(row["status"] == FAILED for row in rows):
        rows.append({"what": command.name, "status": FAILED, "detail": f"{why}: see {stem}.txt"})
    statuses = [row["status"] for row in rows if row["status"] != NOTED] or [FAILED]
    seconds = round(time.monotonic() - begin, 1)
    return found | {
        "command": ["python", *given],
        "seconds": seconds,
        "status": min(statuses, key=severity),
        "rows": rows,
    }


def start(given: list[str], output: IO[str], limit: int) -> int:
    """Run the command in its own process, which may crash or hang; return its exit code."""
    own = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    how: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "timeout": limit}
    try:
        return subprocess.run([sys.executable, *given], cwd=ROOT, env=own, **how).returncode
    except subprocess.TimeoutExpired:
        raise TimeoutError from None


def walk_through(given: list[str], output: IO[str], limit: int) -> int:
    """Run the command in a fork of this process, so that torch is imported once for all."""
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at its import
    for module in ("torch", "on_gpu.kernels", "on_gpu.slice_bench"):
        import_module(module)
    child = get_context("fork").Process(target=be, args=(given, output.fileno()))
    child.start()
    child.join(limit)
    if child.exitcode is None:
        child.kill()
        raise TimeoutError
    return child.exitcode


def be(given: list[str], output: int) -> None:
    """Turn this process into the command: set its output, folder and arguments, and run it."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    if given[0] == "-m":
        sys.argv = given[1:]
        run_module(given[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = given
        run_path(given[0], run_name="__main__")


def table_of(number: int, found: dict[str, Any]) -> Table:
    title = f"{number} {found['name']}: {found['status']}, {found['seconds']:.0f} s"
    table = Table("what", "status", "detail", title=title, title_justify="left")
    for row in found["rows"]:
        table.add_row(row["what"], row["status"], row["detail"])
    return table


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("names", nargs="*", metavar="NAME", help="commands to run; default: all")
    parser.add_argument("--smoke", action="store_true", help="without a GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu_run"))
    parser.add_argument("--engine", type=Path, help="with --smoke: CPU engine of deepseek-tiny")
    arguments = parser.parse_args()
    every = commands(arguments.engine)
    unknown = set(arguments.names) - {command.name for command in every}
    if unknown:
        names = ", ".join(command.name for command in every)
        sys.exit(f"{', '.join(sorted(unknown))}: expected any of {names}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 160)
    ended = Counter[str]()
    for number, command in enumerate(every, 1):
        if arguments.names and command.name not in arguments.names:
            continue
        found = run(command, number, arguments.out.resolve(), arguments.smoke)
        file = arguments.out / f"{number}-{command.name}.json"
        file.write_text(json.dumps(found, indent=1) + "\n")
        console.print(table_of(number, found), markup=False)
        ended[found["status"]] += 1
        if command.name == "preflight" and found["status"] == FAILED:
            console.print("preflight failed: nothing after it was run")
            break
    console.print(", ".join(f"{n} {status}" for status, n in ended.items()), markup=False)
    if ended[FAILED]:
        sys.exit(1)


if __name__ == "__main__":
    main()
