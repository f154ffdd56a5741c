"""Asks TensorRT-RTX for engines of deepseek-tiny for this GPU, whether it is one of RTX or not.

python benchmarks/on_gpu/rtx.py [--smoke] [--rows rows.jsonl]

A GPU that mtpbuild refuses gets the compiler's own answer: its message, or the tokens of the CPU's
engine. The package comes by pip, or by `tools/gpu_pieces.sh`.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.targets.tensorrt_rtx import GPUS
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.errors import MissingDependencyError
from mtpbuild.runtime.gpu.cuda import Device
from mtpbuild.runtime.programs.tensorrt_api import tensorrt_api
from on_gpu.checks import NOTED, Checks, parse_flags

TARGET, PROMPTS = "tensorrt-rtx", ["def fibonacci(n):", "class Stack:"]
COMPILED, RUN = "nextn {}: it compiles for this GPU", "nextn {}: the CPU engine's tokens"


def name_capability(capability: str) -> str:
    """Return a compute capability's name in flags; make one for a GPU that the target refuses."""
    name = GPUS.setdefault(capability, "sm" + capability.replace(".", ""))
    trt: Any = tensorrt_api(TARGET)
    known = dict(trt.ComputeCapability.__members__)
    if name.upper() not in known:  # compiles for the GPU that is there, whichever it is
        trt.ComputeCapability = SimpleNamespace(**known, **{name.upper(): known["CURRENT"]})
    return name


def try_engine(checks: Checks, capability: str, nextn: int, *, gpu: bool) -> None:
    def run(engine: Path) -> list[list[int]]:
        with Engine.load(engine) as loaded:
            results = loaded.generate(PROMPTS, SamplingParams(max_tokens=96))
        return [result.token_ids for result in results]

    def compile_engine() -> str:
        build(asked, WORKBENCH)
        return capability

    def compare() -> str:
        wanted, tokens = (run(each) for each in (build(plain, WORKBENCH)[0].folder, place / "rtx"))
        if tokens != wanted:
            raise ValueError(f"other tokens: {tokens}, not {wanted}")
        return "96 tokens of 2 prompts"

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        plain = BuildRequest("deepseek-tiny", (nextn,), out=place / "cpu")
        options = {"compute_capability": name_capability(capability)}
        asked = replace(plain, target=TARGET, options=options, out=place / "rtx")
        if checks.make(COMPILED.format(nextn), compile_engine, gpu) and gpu:
            checks.make(RUN.format(nextn), compare)


def main() -> None:
    checks, flags = parse_flags(__doc__)
    try:
        checks.say("TensorRT-RTX", NOTED, tensorrt_api(TARGET).__version__)
    except MissingDependencyError as error:
        checks.skip("TensorRT-RTX", why=f"skipped: {error}")
        return
    if flags.smoke:
        try_engine(checks, "8.9", 0, gpu=False)
        checks.skip(RUN.format(0))
    else:
        for nextn in (0, 3):
            try_engine(checks, Device(TARGET).compute_capability, nextn, gpu=True)
    checks.end()


if __name__ == "__main__":
    main()
