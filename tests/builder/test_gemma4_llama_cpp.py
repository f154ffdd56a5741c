"""Drafts of Gemma-4's assistant, step by step, by llama.cpp's server beside transformers."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.support import llama_cpp
from tests.support.gemma4 import SHAPES, continue_greedily, draft, make_assistant, make_trunk
from tests.support.gemma4_gguf import convert, names, spell
from tests.support.gguf_files import usual, write_tensors
from tests.support.llama_cpp import COUNT, NEXTN

WINDOW = 300
NEAR = 0.01  # of logits: its GELU is a table in fp16

pytestmark = llama_cpp.NEEDS_SERVER


def write(path: Path, architecture: str, raw: dict[str, Any], model: Any, text: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    names.write_keys(writer, names.list_keys(raw))
    llama_cpp.write_texts(writer, text.vocab_size)
    write_tensors(writer, convert(model, text), usual(Type.F32))
    return path


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
    with llama_cpp.started("draft-mtp", *files) as server:
        for length in (5, 19):
            torch.manual_seed(length)
            prompt = torch.randint(3, 60, (length,)).tolist()
            wanted = continue_greedily(trunk, prompt, COUNT)
            llama_cpp.check_drafts(
                server, prompt, wanted, lambda tokens: draft(trunk, head, tokens, NEXTN), NEAR
            )
