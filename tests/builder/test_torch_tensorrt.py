"""Target tensorrt as far as it goes without a GPU: `make test-tensorrt`, over TensorRT-RTX."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.weights.scheme import make_scheme
from tests.support.checkpoints import SMALLEST, random_checkpoint
from tests.support.requests import quantize

pytestmark = pytest.mark.tensorrt
pytest.importorskip(
    "tensorrt_rtx", reason="Torch-TensorRT-RTX is not installed: tools/tensorrt_rtx_env.sh"
)
VOCABULARY, EXPERTS = 5000, 24  # more than are sorted, more than are all computed
DATA = Path(__file__).parents[1] / "data"


def test_what_the_converters_build(tmp_path: Path) -> None:
    """Tensors as the manifest has them, kinds of layers, each cache written once and in place, and
    how our kernels are launched.

    After a change that is meant:
    python -m tests.support.torch_tensorrt_shim CHECKPOINT > the golden file
    """
    sizes = {"vocab_size": VOCABULARY, "n_routed_experts": EXPERTS, "num_hidden_layers": 2}
    checkpoint = random_checkpoint(tmp_path / "small", **SMALLEST | sizes)
    assert listed(str(checkpoint)) == golden("tensorrt_networks.json")


def test_quantised_weights(tmp_path: Path) -> None:
    """nvfp4 in main layers and fp8 in the module: constants of prompts, shared in steps."""
    sizes = {"n_routed_experts": EXPERTS, "num_hidden_layers": 2}
    plain = random_checkpoint(tmp_path / "plain", **SMALLEST | sizes)
    scheme = make_scheme("nvfp4", "fp8", None)
    quantize(QuantizeRequest(str(plain), scheme, tmp_path / "quantised"))
    found = listed(str(tmp_path / "quantised"))
    assert "DEQUANTIZE" in found["prefill"]["layers"]
    kinds = Counter[str]()
    for kind, count in found["prefill"]["quantised"].items():
        kinds[kind.partition(" ")[0]] += count
    # e4m3 are the scales of nvfp4 too, and `eh_proj`; experts are no constants, nor are the
    # shared ones among them.
    assert kinds == {"FP4": 2, "FP8": 2 + 1}
    assert "DEQUANTIZE" not in found["decode"]["layers"]
    assert found["decode"]["quantised"] == {}
    places = "mtp.0.mlp.down_proj", "layers.0.mlp.down_proj"
    parts = {f"{place}.{part}" for place in places for part in ("values", "scales")}
    assert set(found["decode"]["shared"]) >= parts


@pytest.mark.parametrize("recipe", ["deepseek-r1", "deepseek-r1-fp4"])
def test_what_a_rank_is_built_of(recipe: str) -> None:
    """The same of four layers of DeepSeek-R1 and its module, one of 8 ranks, and its
    all-reduces; in the recipe's formats.

    After a change that is meant:
    python -m tests.support.torch_tensorrt_shim RECIPE > the golden file
    """
    found = listed(recipe)
    assert found == golden(f"tensorrt_{recipe}_tp8.json")
    main, draft = 1 + 2 * 4, 2 + 2  # sums: embedding, layers; embedding, eh_proj and a layer
    wanted = {"prefill": main + 2, "decode": main + 1 + 3 * (draft + 1)}  # and logits
    wanted["decode_mixed"] = wanted["decode"]
    assert {name: len(found[name]["totals"]) for name in wanted} == wanted


def golden(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def listed(what: str) -> Any:
    run = [sys.executable, "-m", "tests.support.torch_tensorrt_shim", what]
    compiling = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(run, env=compiling, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
