"""The training scripts' smoke mode: from nothing to a checkpoint that the builder takes."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mtpbuild.builder.models import load_config
from mtpbuild.builder.weights.stored import open_checkpoint

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tools" / "train_tiny"


def script(name: str, *flags: object) -> str:
    command = [sys.executable, str(SCRIPTS / name), *map(str, flags)]
    single = os.environ | {"OMP_NUM_THREADS": "1"}  # products this small gain nothing by threads
    done = subprocess.run(command, cwd=ROOT, env=single, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.full
def test_smoke(tmp_path: Path) -> None:
    out, folder = tmp_path / "run", tmp_path / "model"
    script("train.py", "--smoke", "--steps", 16, "--out", out)
    lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    trunk = [line["reasoning"][0] for line in lines]
    module = [line["reasoning"][1] for line in lines if len(line["reasoning"]) > 1]
    ignorant = math.log(2048)  # every token as likely as any other
    assert trunk[0] == pytest.approx(ignorant, abs=0.1)
    assert trunk[-1] < trunk[0] - 0.3
    assert sum(module) / len(module) < ignorant - 0.03, "8 steps, from what the trunk has learnt"
    script("distill.py", "--smoke", "--checkpoint", out / "train.pt", "--out", out)
    folder.mkdir()
    shutil.copyfile(ROOT / "recipes/deepseek_tiny/tokenizer.json", folder / "tokenizer.json")
    script("export.py", "--checkpoint", out / "distill.pt", "--out", folder)
    config = load_config(folder)
    assert config.num_nextn_predict_layers == 3
    open_checkpoint(folder).check(config)
