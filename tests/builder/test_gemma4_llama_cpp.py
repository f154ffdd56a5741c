"""Drafts of Gemma-4's assistant, step by step, by llama.cpp's server beside transformers.

`tools/peers_env.sh` makes the server; without it these tests skip.
"""

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.support.gemma4 import SHAPES, continue_greedily, draft, make_assistant, make_trunk
from tests.support.gemma4_gguf import convert, names, spell
from tests.support.gguf_files import usual, write_tensors
from tests.support.scripts import ROOT, benchmark

SERVER = ROOT / ".venv-peers" / "bin" / "llama-server"
NEXTN, COUNT, WINDOW = 3, 40, 300
NEAR = 0.01  # of logits: its GELU is a table in fp16
FLOATS = [f"--cache-type-{cache}" for cache in ("k", "v", "k-draft", "v-draft")]
CANDIDATE = re.compile(r"draft candidate\s+0, pos\s+(\d+):\s+(\d+) ")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not SERVER.exists(), reason="tools/peers_env.sh has not been run"),
]


def write(path: Path, architecture: str, raw: dict[str, Any], model: Any, text: Any) -> Path:
    """Write a model with a text for each token, which the server wants."""
    writer = gguf.GGUFWriter(path, architecture)
    names.write_keys(writer, names.list_keys(raw))
    benchmark("gguf_file").write_made_up_texts(writer, text.vocab_size)
    write_tensors(writer, convert(model, text), usual(Type.F32))
    return path


def complete(url: str, prompt: list[int]) -> list[int]:
    """Return the server's greedy continuation."""
    body = {"prompt": prompt, "n_predict": COUNT, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"cache_prompt": False, "return_tokens": True}).encode()
    asked = urllib.request.Request(
        f"{url}/completion", data, headers={"Content-Type": "application/json"}
    )
    with benchmark("llama_server").DIRECT.open(asked) as answer:
        tokens: list[int] = json.load(answer)["tokens"]
    return tokens


def read_drafts(log: str) -> list[list[int]]:
    """Return the drafts of each step, as the server's log has them."""
    steps = list[list[int]]()
    for place, token in CANDIDATE.findall(log):
        if place == "0":
            steps.append([])
        steps[-1].append(int(token))
    return steps


@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_drafts_the_same(shape: str, tmp_path: Path) -> None:
    """Windows are longer than contexts: behind one it sees a row less (docs/models.md)."""
    trunk = make_trunk(shape, sliding_window=WINDOW)
    head = make_assistant(shape, ordered=False, sliding_window=WINDOW)
    text = head.config.text_config
    raw = {"text_config": spell(text), "backbone_hidden_size": trunk.config.hidden_size}
    files = (
        write(tmp_path / "t.gguf", "gemma4", spell(trunk.config), trunk, trunk.config),
        write(tmp_path / "h.gguf", names.HEAD, raw, head, text),
    )
    log = tmp_path / "log"
    flags = ["--log-file", str(log), "--verbosity", "9", "--flash-attn", "off"]
    flags += [part for flag in FLOATS for part in (flag, "f32")]
    room = {"slots": 1, "rows": 512, "threads": 1, "drafts": NEXTN, "head": str(files[1])}
    with benchmark("llama_server").started(SERVER, files[0], **room, flags=flags) as url:
        for length in (5, 19):
            seen = len(log.read_text(errors="replace"))
            torch.manual_seed(length)
            prompt = torch.randint(3, 60, (length,)).tolist()
            answer = complete(url, prompt)
            assert answer == continue_greedily(trunk, prompt, COUNT)
            steps, place, checked = read_drafts(log.read_text(errors="replace")[seen:]), 1, 0
            for drafts in steps:
                wanted = draft(trunk, head, prompt + answer[:place], NEXTN)
                gaps = [float(x.max() - x[i]) for i, x in zip(drafts, wanted, strict=True)]
                other = next((i for i, gap in enumerate(gaps) if gap), NEXTN - 1)
                assert gaps[other] < NEAR, "drafts differ"  # later ones go on from another token
                checked += other
                right = [a == b for a, b in zip(drafts, answer[place:], strict=False)]
                place += 1 + [*right, False].index(False)
                if place >= COUNT:
                    break
            assert checked > COUNT
