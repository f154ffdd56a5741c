"""Lists what a GPU machine has, and checks that a compiled part loads, runs and is captured there.

python benchmarks/on_gpu/preflight.py [--smoke] [--rows rows.jsonl]
"""

import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from on_gpu.checks import FAILED, NOTED, Checks, near, parse_flags

NEEDED = (  # packages needed beside torch; tools/gpu_wheels.sh fetches them
    *("hypothesis", "jinja2", "numpy", "onnx", "onnxruntime", "onnxscript", "pydantic", "pytest"),
    *("pytest-xdist", "rich", "safetensors", "tokenizers", "triton", "typer"),
)
LIMIT = 3e-2  # for values of about 1, in bfloat16
MADE, RUN, CAPTURED = ON_THE_GPU = (
    "one part is compiled and loaded",
    "it equals the eager part",
    "it is captured, and its graph equals the eager part",
)


def machine(checks: Checks) -> None:
    checks.say("python", NOTED, platform.python_version())
    checks.say("torch", NOTED, f"{torch.__version__}, CUDA {torch.version.cuda}")
    for name in NEEDED:
        try:
            checks.say(name, NOTED, version(name))
        except PackageNotFoundError:
            checks.say(name, FAILED, "missing: tools/gpu_wheels.sh")
    compiler = shutil.which("g++")
    checks.say("g++", NOTED if compiler else FAILED, compiler or "missing")
    from mtpbuild.builder.targets.inductor.lowering import OPTIONS, aoti_options

    lacking = ", ".join(sorted(OPTIONS.keys() - aoti_options(on_gpu=True).keys())) or "none"
    checks.say("options of AOTInductor that this torch lacks", NOTED, lacking)


def gpu(checks: Checks) -> None:
    own = torch.cuda.get_device_properties(0)
    detail = f"{own.name}, {own.major}.{own.minor}, {own.total_memory / 1e9:.0f} GB"
    checks.say("GPU", NOTED, detail)
    asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if shutil.which(asked[0]):
        versions = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        checks.say("driver", NOTED, versions.strip().replace("\n", ", "))
    found = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None  # type: ignore[no-untyped-call]
    checks.say("NCCL", NOTED if found else FAILED, str(found))


def one_part(checks: Checks) -> None:
    """Check a dense layer of one rank of two, in bfloat16."""
    from mtpbuild.runtime.gpu.torch_cuda import Gpu
    from on_gpu.machine import Machine
    from on_gpu.slice_bench import Bench
    from on_gpu.slices import small

    with tempfile.TemporaryDirectory() as scratch:
        case = replace(small((0,)), dtype="bfloat16")
        bench = Bench(case, Machine("cuda"), True, Path(scratch))
        (program, given, wanted), device = bench.dense_layer(), Gpu()
        made = []
        if not checks.make(MADE, lambda: made.append(bench.runner(program)) or ""):
            return
        torch.cuda.synchronize()
        got = torch.empty_like(wanted)

        def work() -> None:
            got.copy_(made[0].run(given)[0])

        def run_and_compare() -> str:
            got.zero_()
            torch.cuda.synchronize()
            device.run(work)
            device.synchronise()
            return near(got, wanted, LIMIT)

        def capture_and_compare() -> str:
            replay = device.capture(work)
            got.zero_()
            torch.cuda.synchronize()
            replay()
            device.synchronise()
            return near(got, wanted, LIMIT)

        if checks.make(RUN, run_and_compare):
            checks.make(CAPTURED, capture_and_compare)


def main() -> None:
    checks, flags = parse_flags(__doc__)
    machine(checks)
    if flags.smoke:
        checks.skip("GPU", "driver", "NCCL", *ON_THE_GPU)
    elif not torch.cuda.is_available():
        checks.say("GPU", FAILED, "torch finds none; --smoke walks through without one")
    else:
        gpu(checks)
        one_part(checks)
    checks.end()


if __name__ == "__main__":
    main()
