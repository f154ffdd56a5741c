"""Target tensorrt as far as it goes without a GPU: `make test-tensorrt`, over TensorRT-RTX."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builder.conftest import SMALLEST
from tests.checkpoints import random_checkpoint

pytestmark = pytest.mark.tensorrt
pytest.importorskip(
    "tensorrt_rtx",
    reason="Torch-TensorRT-RTX is not installed: tools/tensorrt_rtx_env.sh",
)
VOCABULARY, EXPERTS = 5000, 24  # more than are sorted, more than are all computed
GOLDEN = Path(__file__).parents[1] / "data" / "tensorrt_networks.json"


def test_what_the_converters_build(tmp_path: Path) -> None:
    """Tensors as the manifest has them, kinds of layers, each cache written once and in place, and
    how our kernels are launched.

    After a change that is meant: python -m tests.torch_tensorrt_shim CHECKPOINT > the golden file.
    """
    sizes = {"vocab_size": VOCABULARY, "n_routed_experts": EXPERTS}
    checkpoint = random_checkpoint(tmp_path / "small", **SMALLEST, **sizes)
    run = [sys.executable, "-m", "tests.torch_tensorrt_shim", str(checkpoint)]
    compiling = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(run, env=compiling, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(GOLDEN.read_text(encoding="utf-8"))
