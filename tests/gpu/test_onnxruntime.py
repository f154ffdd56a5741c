"""The engine directory of the CPU, run by onnxruntime on a GPU: the same tokens."""

import pytest
import torch

from mtpbuild.runtime import Engine, SamplingParams
from tests.support.engines import EngineBuilder

ort = pytest.importorskip("onnxruntime")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in ort.get_available_providers(), reason="no onnxruntime-gpu"
    ),
]
PROMPTS = ["def fibonacci(n):", "class Stack:", "import os\n"]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6, "seed": 3}])
@pytest.mark.parametrize(("nextn", "batch"), [(0, 1), (3, 1), (3, 3)])
def test_parity(
    nextn: int, batch: int, params: dict[str, float], build_engine: EngineBuilder
) -> None:
    engine = build_engine("deepseek-tiny", nextn, max_batch=batch, portable=True)
    asked = SamplingParams(max_tokens=96, **params)  # type: ignore[arg-type]
    output = []
    for provider in ("cpu", "cuda"):
        with Engine.load(engine, provider=provider) as loaded:
            output.append([r.token_ids for r in loaded.generate(PROMPTS, asked)])
    assert output[0] == output[1]
