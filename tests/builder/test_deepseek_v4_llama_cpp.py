"""DeepSeek-V4's texts and drafts, step by step, by llama.cpp's server beside the plain model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import llama_cpp
from tests.support.deepseek_v4 import draft_in_chain, load_plain, save
from tests.support.deepseek_v4_gguf import write
from tests.support.llama_cpp import COUNT, NEXTN

# The Hadamard products of llama.cpp want powers of two, and heads unlike the indexer's.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 128, "q_lora_rank": 32,
    "o_lora_rank": 32, "index_head_dim": 64, "initializer_range": 0.15, "swiglu_limit": 0.75,
    "partial_rotary_factor": 8 / 128, "vocab_size": 60,
}  # fmt: skip
NEAR = 0.01  # of logits

pytestmark = llama_cpp.NEEDS_SERVER


@torch.no_grad()
def continue_greedily(trunk: Any, prompt: list[int]) -> list[int]:
    """Continue without the token that ends answers, which the server is told to ignore."""
    tokens = torch.tensor([prompt])
    for _ in range(COUNT):
        best = trunk(tokens).logits[:, -1:, 1:].argmax(-1) + 1
        tokens = torch.cat([tokens, best], 1)
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer


def check(folder: Path, lengths: tuple[int, ...], *, pad: bool = False, **sizes: Any) -> None:
    """Check texts and drafts after prompts of these lengths."""
    torch.set_num_threads(1)
    trunk = save(folder / "stored", native=True, heavy=128, **SIZES | sizes)
    plain = load_plain(folder / "stored")

    def write_texts(writer: Any) -> None:
        llama_cpp.write_texts(writer, SIZES["vocab_size"])

    files = [
        write(folder / name, folder / "stored", head=head, more=write_texts)
        for name, head in (("t.gguf", False), ("h.gguf", True))
    ]
    draft = partial(draft_in_chain, plain, nextn=NEXTN, pad=pad)
    with llama_cpp.started("draft-mtp", *files) as server:
        for length in lengths:
            torch.manual_seed(length)
            prompt = torch.randint(3, SIZES["vocab_size"], (length,)).tolist()
            wanted = continue_greedily(trunk, prompt)
            llama_cpp.check_drafts(server, prompt, wanted, draft, NEAR)


@pytest.mark.parametrize("yarn", [True, False])
def test_llama_cpp_drafts_the_same(yarn: bool, tmp_path: Path) -> None:
    """After prompts that are longer than the module's window: rows of 128 tokens close, too."""
    check(tmp_path, (13, 60, 140, 250), yarn=yarn)


def test_llama_cpp_has_a_row_of_the_first_token(tmp_path: Path) -> None:
    """Beside zeros, while the window sees it; by the formula there is none (docs/models.md)."""
    check(tmp_path, (5,), pad=True, sliding_window=300)
    with pytest.raises(AssertionError, match="differs by"):
        check(tmp_path, (5,), sliding_window=300)
