"""Engines of both TensorRT targets on the GPU of this machine: the tokens of the CPU's engine."""

from typing import Any

import pytest

from mtpbuild.builder.targets.tensorrt_rtx import GPUS as RTX
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.errors import MtpbuildError
from mtpbuild.runtime.gpu.cuda import Device
from mtpbuild.runtime.programs.tensorrt_api import tensorrt_api
from tests.support.engines import EngineBuilder

pytestmark = pytest.mark.gpu
PROMPTS = ["def fibonacci(n):", "class Stack:", "import os\n"]


@pytest.fixture(params=["tensorrt", "tensorrt stripped", "tensorrt-rtx"])
def flags(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the flags of a build for this GPU; skip where packages or GPU are missing."""
    target, _, stripped = request.param.partition(" ")
    try:
        tensorrt_api(target)
        capability = Device(target).compute_capability
    except MtpbuildError as error:
        pytest.skip(str(error))
    if target == "tensorrt":
        return {"target": target, "dtype": "float32", "strip_weights": bool(stripped)}
    if capability not in RTX:
        pytest.skip(f"TensorRT-RTX has no engines for compute capability {capability}")
    return {"target": target, "compute_capability": capability}


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6, "top_p": 0.95, "seed": 3}])
@pytest.mark.parametrize(("nextn", "batch"), [(0, 1), (3, 1), (3, 3)])
def test_parity(
    nextn: int,
    batch: int,
    params: dict[str, float],
    flags: dict[str, Any],
    build_engine: EngineBuilder,
) -> None:
    asked = SamplingParams(max_tokens=96, **params)  # type: ignore[arg-type]
    output = []
    for own in ({}, flags):
        with Engine.load(build_engine("deepseek-tiny", nextn, max_batch=batch, **own)) as loaded:
            output.append([r.token_ids for r in loaded.generate(PROMPTS, asked)])
    assert output[0] == output[1]
