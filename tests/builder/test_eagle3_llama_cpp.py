"""Drafts of EAGLE-3 heads, step by step, by llama.cpp's server beside the plain model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.builder.models import find_family
from tests.reference.eagle3 import LAYER, TAPS, PlainEagle3, make_head
from tests.reference.recompute import draft_logits, greedy
from tests.support import llama_cpp
from tests.support.dense_gguf import write_dense
from tests.support.eagle3_gguf import write_gguf_head
from tests.support.families import make_config, make_family
from tests.support.llama_cpp import COUNT, NEXTN

TRUNKS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": None, "num_hidden_layers": 4},
    "qwen3": {"rope_scaling": None, "num_hidden_layers": 4},
}
HEADS: dict[str, tuple[dict[str, Any], bool]] = {
    "eagle": ({"draft_vocab_size": 45}, False),
    "own embedding": ({"norm_before_fc": True, "draft_vocab_size": 56}, True),
    "speculators": ({"norm_before_residual": True, "draft_vocab_size": 40}, False),
}
NEAR = 1e-3  # of logits

pytestmark = llama_cpp.NEEDS_SERVER


@pytest.mark.parametrize("name", TRUNKS)
@pytest.mark.parametrize("dialect", HEADS)
def test_llama_cpp_drafts_the_same(name: str, dialect: str, tmp_path: Path) -> None:
    c, trunk = make_config(name, **TRUNKS[name]), make_family(name, **TRUNKS[name])
    trunk.lm_head.weight.data[0] = 0.0  # the end, which the server is told not to say
    width = c["hidden_size"]
    changes, embeds = HEADS[dialect]
    raw = LAYER | {"hidden_size": width, "target_hidden_size": width, TAPS: [0, 1, 3]} | changes
    weights = make_head(trunk, raw, embeds)
    texts = partial(llama_cpp.write_texts, vocab_size=c["vocab_size"])
    files = (
        write_dense(tmp_path / "t.gguf", c, trunk, keys=texts),
        write_gguf_head(tmp_path / "h.gguf", raw, weights, texts),
    )
    config = find_family(c).config.parse(c)
    plain = PlainEagle3(trunk, config, raw, weights)
    with llama_cpp.started("draft-eagle3", *files) as server:
        for length in (5, 19):
            torch.manual_seed(length)
            prompt = torch.randint(3, c["vocab_size"], (length,)).tolist()
            wanted = greedy(trunk, prompt, COUNT)
            llama_cpp.check_drafts(
                server,
                prompt,
                wanted,
                lambda tokens: draft_logits(plain, tokens, NEXTN, "mtp-eagle"),
                NEAR,
            )
