"""The training scripts' smoke mode: from nothing to a checkpoint that the builder takes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from mtpbuild.builder.checkpoint.tensors import open_checkpoint
from mtpbuild.builder.models import load_config

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tools" / "train_tiny"


def script(name: str, *flags: object) -> str:
    command = [sys.executable, str(SCRIPTS / name), *map(str, flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_smoke(tmp_path: Path) -> None:
    out, folder = tmp_path / "run", tmp_path / "model"
    script("train.py", "--smoke", "--out", out)
    losses = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert all(0 < value < 20 for loss in losses for value in (*loss["code"], *loss["reasoning"]))
    script("distill.py", "--smoke", "--checkpoint", out / "train.pt", "--out", out)
    folder.mkdir()
    shutil.copyfile(ROOT / "recipes/deepseek_tiny/tokenizer.json", folder / "tokenizer.json")
    script("export.py", "--checkpoint", out / "distill.pt", "--out", folder)
    config = load_config(folder)
    assert config.num_nextn_predict_layers == 3
    open_checkpoint(folder).check(config)
