"""Writing an engine's weights takes a few times the memory of the largest tensor, not the model's.

The checkpoint is of true headers and holes; the engine is 26 times its largest tensor.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.checkpoint.shards import SINGLE
from mtpbuild.builder.formats import Entry
from mtpbuild.builder.models.common.weight import WHOLE
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.builder.models.deepseek_v3.weights import weight_table
from mtpbuild.builder.weights.placed import Shard
from mtpbuild.runtime.contract.manifest import WEIGHTS
from tests.support.checkpoints import BASE

SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "n_routed_experts": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
}
LARGEST = 8192 * 256 * 4  # bytes of the embedding, in fp32
# By itself glibc keeps up to 32 MB of what is freed, more or less by chance: the peak of one
# program varied by half. With this its large blocks go back at once.
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
WRITE = """
import re, sys
from pathlib import Path
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.builder.program.opened_model import open_model
from mtpbuild.builder.plan.recipe import FoundModel
from mtpbuild.builder.checkpoint.generation import read_generation_ids
from mtpbuild.builder.models import load_config
from mtpbuild.builder.targets.inductor.pipeline import INDUCTOR
from mtpbuild.builder.targets.onnxruntime.pipeline import CPU
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.weights.scheme import make_engine_scheme
from mtpbuild.runtime.ranks import Ranks

folder, out, (tp, rank) = Path(sys.argv[1]), Path(sys.argv[2]), map(int, sys.argv[3:5])
weights, head = (None if name == "none" else name for name in sys.argv[5:])
config = load_config(folder)
source = open_model(
    FoundModel("x", "x", folder),
    config,
    read_generation_ids(folder, config),
    GraphStyle(formats=("int4", "int8"), pipeline=CPU if tp == 1 else INDUCTOR),
    ranks=Ranks(tp),
    scheme=make_engine_scheme(weights, head),
)

def resident(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
EngineWeights(source).write(out, None, rank)
print(resident("VmHWM") - before)
"""


def holes(folder: Path, shape: dict[str, Any]) -> Path:
    """Write a checkpoint of true headers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE | shape))
    table = weight_table(DeepseekV3Config.parse(BASE | shape), WHOLE)
    tensors = {s.name: Entry("BF16", s.shape) for weight in table for s in weight.stored}
    assert (
        max(entry.nbytes for entry in tensors.values()) * 2 * 8192 == LARGEST * shape["vocab_size"]
    )
    shard = Shard(SINGLE, tensors)
    with (folder / shard.file).open("wb") as file:
        file.write(shard.header())
        file.truncate(file.tell() + shard.nbytes)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return holes(tmp_path_factory.mktemp("holes") / "model", SHAPE)


def peak(checkpoint: Path, out: Path, *how: object) -> tuple[int, int]:
    """Return bytes that writing an engine takes at once, and bytes of its weights."""
    run = [sys.executable, "-c", WRITE, str(checkpoint), str(out), *map(str, how)]
    env = os.environ | AT_ONCE
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=env)
    written = (out / WEIGHTS).stat().st_size
    (out / WEIGHTS).unlink()
    return int(done.stdout), written


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), pytest.param(4, 3, marks=pytest.mark.full)])
def test_the_peak_is_bounded(tp: int, rank: int, checkpoint: Path, tmp_path: Path) -> None:
    taken, written = peak(checkpoint, tmp_path, tp, rank, "none", "none")
    assert written > 24 * LARGEST / tp
    assert 0 < taken < 3 * LARGEST


@pytest.mark.full
def test_quantising_on_the_way(tmp_path: Path) -> None:
    """Embedding and head never exist as floats, which were 8 * LARGEST each, but integers twice.

    Some rows at a time are encoded; a copy of the integers is packed for the kernels.
    """
    checkpoint = holes(tmp_path / "model", SHAPE | {"vocab_size": 8 * SHAPE["vocab_size"]})
    taken, written = peak(checkpoint, tmp_path, 1, 0, "int4", "int8")
    assert written > 7 * LARGEST
    assert 0 < taken < 5.5 * LARGEST
