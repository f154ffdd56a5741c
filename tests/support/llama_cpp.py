"""llama.cpp's server, whose log says what it drafted.

`tools/peers_env.sh` makes it; without it tests that have `NEEDS_SERVER` skip.
"""

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest
from torch import Tensor

from tests.support.scripts import ROOT, benchmark

PROGRAM = ROOT / ".venv-peers" / "bin" / "llama-server"
NEXTN, COUNT = 3, 40  # drafts of a step, tokens of an answer
CACHES = [f"--cache-type-{cache}" for cache in ("k", "v", "k-draft", "v-draft")]
CANDIDATE = re.compile(r"draft candidate\s+0, pos\s+(\d+):\s+(\d+) \(\s*([\d.]+)\)")
CANDIDATES = 10  # tokens of which a draft is chosen, by their probabilities among these
Draft = tuple[int, float]  # a token and its probability
NEEDS_SERVER = [
    pytest.mark.full,
    pytest.mark.skipif(not PROGRAM.exists(), reason="tools/peers_env.sh has not been run"),
]


@dataclass
class DraftingServer:
    """A running server with a head."""

    url: str
    log: Path

    def answer(self, prompt: list[int]) -> tuple[list[int], list[list[Draft]]]:
        """Return the greedy continuation of a prompt, and the drafts of each step."""
        seen = len(self.log.read_text(errors="replace"))
        body = {"prompt": prompt, "n_predict": COUNT, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body | {"cache_prompt": False, "return_tokens": True}).encode()
        asked = urllib.request.Request(
            f"{self.url}/completion", data, headers={"Content-Type": "application/json"}
        )
        with benchmark("llama_server").DIRECT.open(asked) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens, read_drafts(self.log.read_text(errors="replace")[seen:])


def read_drafts(log: str) -> list[list[Draft]]:
    steps = list[list[Draft]]()
    for place, token, probability in CANDIDATE.findall(log):
        if place == "0":
            steps.append([])
        steps[-1].append((int(token), float(probability)))
    return steps


@contextmanager
def started(kind: str, trunk: Path, head: Path) -> Iterator[DraftingServer]:
    """Start the server in fp32; kind: a `--spec-type`."""
    log = head.with_name("log")
    flags = ["--log-file", str(log), "--verbosity", "9", "--flash-attn", "off"]
    flags += [part for flag in CACHES for part in (flag, "f32")]
    flags += ["--spec-type", kind, "--spec-draft-n-max", str(NEXTN)]
    room = {"slots": 1, "rows": 512, "threads": 1, "head": str(head), "flags": flags}
    with benchmark("llama_server").started(PROGRAM, trunk, **room) as url:
        yield DraftingServer(url, log)


def write_texts(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Write a text for each token, which the server wants."""
    benchmark("gguf_file").write_made_up_texts(writer, vocab_size)


def check_drafts(
    server: DraftingServer,
    prompt: list[int],
    wanted: list[int],
    logits: Callable[[list[int]], list[Tensor]],
    near: float,
) -> None:
    """Check an answer and each step's drafts; others may be drafted where logits are so near.

    logits: returns those of each draft after some tokens.
    """
    answer, steps = server.answer(prompt)
    assert answer == wanted
    place, equal = 1, 0
    for drafts in steps:
        if place >= COUNT:
            break
        equal += count_equal(drafts, logits(prompt + answer[:place]), near)
        right = [a == b for (a, _), b in zip(drafts, answer[place:], strict=False)]
        place += 1 + [*right, False].index(False)
    assert equal > COUNT


def count_equal(drafts: list[Draft], logits: list[Tensor], near: float) -> int:
    """Return how many drafts of a step are the best; fail if others are not nearly so.

    Probabilities may differ by twice as much: llama.cpp reads GELU from a table.
    """
    gaps = [float(x.max() - x[i]) for (i, _), x in zip(drafts, logits, strict=True)]
    other = next((i for i, gap in enumerate(gaps) if gap), NEXTN)
    # Later ones go on from another token.
    assert other == NEXTN or gaps[other] < near, f"draft {other + 1} differs by {gaps[other]}"
    wanted = [float(x.topk(CANDIDATES).values.softmax(0)[0]) for x in logits[:other]]
    errors = [abs(p - q) for (_, p), q in zip(drafts, wanted, strict=False)]
    assert max(errors, default=0) < 2 * near, f"a probability differs by {max(errors)}"
    return other
