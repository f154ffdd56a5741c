"""DeepSeek-V4's texts and drafts, step by step, by llama.cpp's server beside the plain model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import llama_cpp
from tests.support.deepseek_v4 import draft_in_chain, load_plain, move_windows, save
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


Draft = Callable[[Any, list[int], int], list[Tensor]]  # the plain model, tokens, nextn


@torch.no_grad()
def draft_block(plain: Any, tokens: list[int], nextn: int) -> list[Tensor]:
    logits: list[Tensor] = plain.draft_block(tokens, nextn)
    return logits


@torch.no_grad()
def draft_with_moving_windows(plain: Any, tokens: list[int], nextn: int) -> list[Tensor]:
    move_windows(plain)
    logits: list[Tensor] = plain.draft_block(tokens, nextn)
    return logits


def check(
    folder: Path,
    lengths: tuple[int, ...],
    draft: Draft = draft_in_chain,
    *,
    stages: int = 0,
    **sizes: Any,
) -> None:
    """Check texts and drafts after prompts of these lengths; stages: of a DSpark head."""
    torch.set_num_threads(1)
    spelling: dict[str, Any] = {"native": True, "heavy": 128, "stages": stages, "markov": 0.25}
    trunk = save(folder / "stored", **spelling, **SIZES | sizes)
    plain = load_plain(folder / "stored")

    def write_texts(writer: Any) -> None:
        llama_cpp.write_texts(writer, SIZES["vocab_size"])

    kind: dict[str, Any] = {"stages": stages, "head": not stages, "more": write_texts}
    files = (
        write(folder / "t.gguf", folder / "stored", more=write_texts),
        write(folder / "h.gguf", folder / "stored", **kind),
    )
    with llama_cpp.started("draft-dspark" if stages else "draft-mtp", *files) as server:
        for length in lengths:
            torch.manual_seed(length)
            prompt = torch.randint(3, SIZES["vocab_size"], (length,)).tolist()
            wanted = continue_greedily(trunk, prompt)
            llama_cpp.check_drafts(
                server, prompt, wanted, lambda tokens: draft(plain, tokens, NEXTN), NEAR
            )


@pytest.mark.parametrize("yarn", [True, False])
def test_llama_cpp_drafts_the_same(yarn: bool, tmp_path: Path) -> None:
    """After prompts that are longer than the module's window: rows of 128 tokens close, too."""
    check(tmp_path, (13, 60, 140, 250), yarn=yarn)


def test_llama_cpp_has_a_row_of_the_first_token(tmp_path: Path) -> None:
    """Beside zeros, while the window sees it; by the formula there is none (docs/models.md)."""
    check(tmp_path, (5,), partial(draft_in_chain, pad=True), sliding_window=300)
    with pytest.raises(AssertionError, match="differs by"):
        check(tmp_path, (5,), sliding_window=300)


@pytest.mark.parametrize("stages", [1, 3])
def test_llama_cpp_drafts_the_same_blocks(stages: int, tmp_path: Path) -> None:
    """While the window sees the whole context."""
    check(tmp_path, (5, 20), draft_block, stages=stages, sliding_window=64)


@pytest.mark.parametrize("stages", [1, 3])
def test_llama_cpp_moves_the_window_in_a_block(stages: int, tmp_path: Path) -> None:
    """By the formula all of a block sees the same rows before it (docs/models.md)."""
    check(tmp_path, (5, 140), draft_with_moving_windows, stages=stages)
    with pytest.raises(AssertionError, match="differs by"):
        check(tmp_path, (5, 140), draft_block, stages=stages)
