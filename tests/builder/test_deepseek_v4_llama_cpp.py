"""DeepSeek-V4's texts and drafts, step by step, by llama.cpp's server beside the plain model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builder.test_deepseek_v4 import draft, load_plain
from tests.support import llama_cpp
from tests.support.deepseek_v4 import save
from tests.support.deepseek_v4_gguf import write
from tests.support.llama_cpp import COUNT

# Sizes that llama.cpp has kernels for: powers of two, whole rows of its Hadamard products.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 64, "q_lora_rank": 32,
    "o_lora_rank": 32, "index_head_dim": 64, "initializer_range": 0.15, "swiglu_limit": 0.75,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
NEAR = 0.01  # of logits

pytestmark = llama_cpp.NEEDS_SERVER


@torch.no_grad()
def continue_greedily(trunk: Any, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    for _ in range(COUNT):
        tokens = torch.cat([tokens, trunk(tokens).logits[:, -1:].argmax(-1)], 1)
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize("yarn", [True, False])
def test_llama_cpp_drafts_the_same(yarn: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    stored = tmp_path / "stored"
    trunk = save(stored, native=True, heavy=128, yarn=yarn, **SIZES)
    plain = load_plain(stored)

    def write_texts(writer: Any) -> None:
        llama_cpp.write_texts(writer, 60)

    files = [
        write(tmp_path / name, stored, head=head, more=write_texts)
        for name, head in (("t.gguf", False), ("h.gguf", True))
    ]
    with llama_cpp.started("draft-mtp", *files) as server:
        for length in (5, 19, 140):
            torch.manual_seed(length)
            prompt = torch.randint(3, 60, (length,)).tolist()
            wanted = continue_greedily(trunk, prompt)
            llama_cpp.check_drafts(
                server, prompt, wanted, lambda tokens: draft(plain, tokens), NEAR
            )
