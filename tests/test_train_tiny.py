"""The training script on small models: from nothing to a checkpoint that the builder takes."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.models import load_config
from mtpbuild.builder.weights.files import open_checkpoint

ROOT = Path(__file__).parents[1]
SMALL: dict[str, dict[str, Any]] = {
    "deepseek_tiny": {
        "moe_intermediate_size": 16, "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 16,
    },
    "qwen_tiny": {
        "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
}  # fmt: skip


def train(folder: Path, out: Path, *flags: object) -> list[dict[str, Any]]:
    """Run the script; return the lines of its log."""
    lines = run("train.py", folder, "--out", out, "--small", *flags, "--log-every", "1")
    return [json.loads(line) for line in lines]


def run(script: str, *flags: object) -> list[str]:
    command = [sys.executable, f"tools/train_tiny/{script}", *flags]
    single = os.environ | {"OMP_NUM_THREADS": "1"}  # products this small gain nothing by threads
    words = [*map(str, command)]
    done = subprocess.run(words, cwd=ROOT, env=single, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "modules"), [("deepseek_tiny", 3), ("qwen_tiny", 1)])
def test_trunk_then_modules(tmp_path: Path, recipe: str, modules: int) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    config = json.loads((ROOT / "recipes" / recipe / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 64} | SMALL[recipe]
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copyfile(ROOT / "recipes" / recipe / "tokenizer.json", folder / "tokenizer.json")
    lines = train(folder, out, "--steps", 32)
    trunk = [line["reasoning"][0] for line in lines]
    module = [line["reasoning"][1] for line in lines if len(line["reasoning"]) > 1]
    ignorant = math.log(2048)  # every token as likely as any other
    assert trunk[0] == pytest.approx(ignorant, abs=0.1)
    assert trunk[-1] < trunk[0] - 0.3
    # Batches differ by 0.05; 16 steps, from what the trunk has learnt.
    assert sum(module[-4:]) / 4 < sum(module[:4]) / 4 - 0.05
    weights = (out / "model.safetensors").read_bytes()
    assert train(folder, out, "--steps", 32) == [], "a run that was ended has nothing to resume"
    alone = train(folder, out, "--modules", "--steps", 12)
    assert len(alone[0]["code"]) == modules + 3
    assert all(line["reasoning"][0] > 0 for line in alone)
    read = load_config(out)
    assert read.num_nextn_predict_layers == modules
    checkpoint = open_checkpoint(out)
    checkpoint.check(read)
    assert (out / "model.safetensors").read_bytes() != weights


@pytest.mark.full
def test_a_small_deepseek_v4(tmp_path: Path) -> None:
    """A trained one is measured by the script itself; here texts are of a model that knows none."""
    lines = run("deepseek_v4.py", tmp_path, "--small")
    for engine, plain, texts in (lines[-6:-3], lines[-3:]):  # of the module, of the DSpark head
        assert engine.removeprefix("engine").strip() == plain.removeprefix("plain model").strip()
        assert texts.startswith("1 of 1 texts are the plain model's")
    assert lines[-6].endswith("steps 96")
    checkpoint, read = open_checkpoint(tmp_path), load_config(tmp_path)
    checkpoint.check(read)
    assert read.num_nextn_predict_layers == 1
    assert checkpoint.tensors["model.layers.0.mlp.gate.tid2eid"].dtype == "I64"
    read = load_config(tmp_path / "dspark")
    open_checkpoint(tmp_path / "dspark").check(read)
    assert read.head is not None
