"""The training scripts' smoke mode: from nothing to a checkpoint that the builder takes."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtpbuild.builder.models import load_config
from mtpbuild.builder.weights.files import open_checkpoint
from tests.support.transformers_oracle import transformers_model

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tools" / "train_tiny"


def script(name: str, *flags: object) -> str:
    command = [sys.executable, str(SCRIPTS / name), *map(str, flags)]
    single = os.environ | {"OMP_NUM_THREADS": "1"}  # products this small gain nothing by threads
    done = subprocess.run(command, cwd=ROOT, env=single, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize(("model", "modules"), [("deepseek-tiny", 3), ("qwen-tiny", 1)])
def test_smoke(tmp_path: Path, model: str, modules: int) -> None:
    out, folder = tmp_path / "run", tmp_path / "model"
    script("train.py", "--smoke", "--model", model, "--steps", 32, "--out", out)
    lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    trunk = [line["reasoning"][0] for line in lines]
    module = [line["reasoning"][1] for line in lines if len(line["reasoning"]) > 1]
    ignorant = math.log(2048)  # every token as likely as any other
    assert trunk[0] == pytest.approx(ignorant, abs=0.1)
    assert trunk[-1] < trunk[0] - 0.3
    # Batches differ by 0.05; 16 steps, from what the trunk has learnt.
    assert sum(module[-4:]) / 4 < sum(module[:4]) / 4 - 0.05
    checkpoint = out / "train.pt"
    script("distill.py", "--smoke", "--model", model, "--checkpoint", checkpoint, "--out", out)
    folder.mkdir()
    shutil.copyfile(ROOT / "recipes/deepseek_tiny/tokenizer.json", folder / "tokenizer.json")
    script("export.py", "--checkpoint", out / "distill.pt", "--out", folder)
    equal_to_transformers(folder)
    config = load_config(folder)
    assert config.num_nextn_predict_layers == modules
    open_checkpoint(folder).check(config)


def equal_to_transformers(folder: Path) -> None:
    """Two documents of a row have the logits that each has alone, with a cache and without."""
    tokens = torch.randint(16, 2048, (1, 90), generator=torch.Generator().manual_seed(1))
    torch.save(tokens, folder / "tokens.pt")
    command = [sys.executable, "-c", LOGITS, str(folder)]
    subprocess.run(command, cwd=SCRIPTS, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    ours = torch.load(folder / "logits.pt")
    model = transformers_model(folder)
    with torch.no_grad():
        theirs = torch.cat([model(part).logits for part in tokens.split([60, 30], 1)], 1)
    for logits in ours:
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)


LOGITS = """
import sys, torch
from pathlib import Path
from export import load_folder
from generate import Cache
folder = Path(sys.argv[1])
model, tokens = load_folder(folder), torch.load(folder / "tokens.pt")
mask = torch.full((90, 90), -1e9).triu(1)
mask[60:, :60] = -1e9
cache = Cache(model)
with torch.no_grad():
    whole = model.trunk(tokens, mask[None, None])
    steps = [cache.advance(tokens[:, :40], mask[None, None, :40, :40])]
    for i in range(40, 90):
        steps.append(cache.advance(tokens[:, i : i + 1], mask[None, None, i : i + 1, : i + 1]))
    torch.save([model.logits(whole), model.logits(torch.cat(steps, 1))], folder / "logits.pt")
"""


@pytest.mark.full
def test_the_delta_rules_gradients() -> None:
    """The compiled rule and its gradients are those of the rule that goes token by token."""
    code = """
import torch
from delta import delta_rule, recurrent
torch.manual_seed(0)
q, k = (torch.nn.functional.normalize(torch.randn(2, 40, 3, 32), dim=-1) for _ in range(2))
v, decay, beta = torch.randn(2, 40, 3, 32), torch.rand(2, 40, 3), torch.rand(2, 40, 3)
decay[:, 7] = 0
given = [x.requires_grad_() for x in (q, k, v, decay, beta)]
made, (true, _) = delta_rule(*given), recurrent(*given, torch.zeros(2, 3, 32, 32))
torch.testing.assert_close(made, true, atol=1e-5, rtol=1e-5)
weight = torch.randn_like(made)
pairs = (torch.autograd.grad((y * weight).sum(), given) for y in (made, true))
for ours, theirs in zip(*pairs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
"""
    subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, check=True)
