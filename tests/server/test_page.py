"""The page that the server shows: its script runs in node, against a live server."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.server.options import ServerOptions
from tests.support.live_server import live

pytestmark = [
    pytest.mark.xdist_group("tiny"),
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
]
ROOT = Path(__file__).parents[2]
DOM, PAGE = ROOT / "tests/support/page_dom.mjs", ROOT / "runtime/server/page.html"
QUESTIONS = ("What is 47 + 85?", "And 3 + 4?")


def test_thoughts_are_folded(engine: Engine) -> None:
    """Thought and answer stand apart, `</think>` nowhere; turns are sent without their thought."""
    asked = [{"role": "user", "content": QUESTIONS[0]}]
    whole = engine.generate(engine.chat_ids(asked), SamplingParams(max_tokens=300)).text
    with live(engine, ServerOptions(key="k")) as server:
        run: list[str | Path] = ["node", DOM, PAGE, server.url, "k", *QUESTIONS]
        done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert [bubble["kind"] for bubble in told["seen"]] == ["user", "answer"] * 2
    thought, said = whole.split("</think>")
    answer = told["seen"][1]
    assert answer["thought"] == {"open": False, "text": "Thought" + thought}
    assert answer["text"] == said.strip()
    assert "132" in answer["text"]
    assert "think>" not in done.stdout
    *first, second = told["sent"]
    assert first == [asked, asked]  # without a key, then with the one that it was given
    assert [turn["role"] for turn in second] == ["user", "assistant", "user"]
    assert second[1]["content"].strip() == answer["text"]
