"""Target tensorrt as far as it goes without a GPU: `make test-tensorrt`, over TensorRT-RTX."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builder.conftest import SMALLEST
from tests.checkpoints import random_checkpoint

pytestmark = pytest.mark.tensorrt
pytest.importorskip(
    "tensorrt_rtx",
    reason="Torch-TensorRT-RTX is not installed: tools/tensorrt_rtx_env.sh",
)
VOCABULARY, EXPERTS = 5000, 24  # more than are sorted, more than are all computed
DATA = Path(__file__).parents[1] / "data"


def test_what_the_converters_build(tmp_path: Path) -> None:
    """Tensors as the manifest has them, kinds of layers, each cache written once and in place, and
    how our kernels are launched.

    After a change that is meant: python -m tests.torch_tensorrt_shim CHECKPOINT > the golden file.
    """
    sizes = {"vocab_size": VOCABULARY, "n_routed_experts": EXPERTS, "num_hidden_layers": 2}
    checkpoint = random_checkpoint(tmp_path / "small", **SMALLEST | sizes)
    assert listed(str(checkpoint)) == golden("tensorrt_networks.json")


def test_what_a_rank_of_r1_is_built_of() -> None:
    """The same of four layers of DeepSeek-R1 and its module, one of 8 ranks, and its all-reduces.

    After a change that is meant: python -m tests.torch_tensorrt_shim r1 > the golden file.
    """
    found = listed("r1")
    assert found == golden("tensorrt_r1_tp8.json")
    main, draft = 1 + 2 * 4, 2 + 2  # sums: embedding, layers; embedding, eh_proj and a layer
    wanted = {"prefill": main + 2, "decode": main + 1 + 3 * (draft + 1)}  # and logits
    wanted["decode_mixed"] = wanted["decode"]
    assert {name: len(found[name]["totals"]) for name in wanted} == wanted


def golden(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def listed(what: str) -> Any:
    run = [sys.executable, "-m", "tests.torch_tensorrt_shim", what]
    compiling = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(run, env=compiling, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
