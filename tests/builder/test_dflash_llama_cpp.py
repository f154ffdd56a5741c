"""Drafts of DFlash and DSpark heads, step by step, by llama.cpp's server beside the plain model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from mtpbuild.builder.models import find_family
from mtpbuild.builder.models.common.plain import PlainCausalLM
from tests.reference.dflash import MASK, SIZES, PlainBlockHead, make_head
from tests.reference.recompute import greedy
from tests.support import llama_cpp
from tests.support.dense_gguf import write_dense
from tests.support.dflash_gguf import write_gguf_head
from tests.support.families import make_config, make_family
from tests.support.gguf_files import HYBRID, converted, usual, write_gguf
from tests.support.llama_cpp import COUNT, NEXTN

TRUNKS: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_scaling": None, "num_hidden_layers": 4},
    "qwen3.5": HYBRID | {"num_hidden_layers": 4, "mtp_num_hidden_layers": 0},
}
TAPS = {"target_layer_ids": [0, 2], "mask_token_id": MASK}
FORMS: dict[str, dict[str, Any]] = {
    "draft-dflash": {"block_size": 8},
    "draft-dspark": {"block_size": 3, "markov_rank": 6},
}
NEAR = 1e-3  # of logits

pytestmark = llama_cpp.NEEDS_SERVER


def write_trunk(
    path: Path, c: dict[str, Any], trunk: PlainCausalLM, texts: Callable[[gguf.GGUFWriter], None]
) -> Path:
    if c["model_type"] == "qwen3":
        return write_dense(path, c, trunk, keys=texts)
    stored = trunk.state_dict()
    tensors = converted(c, {*stored}, lambda name: stored[name].float().numpy())
    return write_gguf(path, c, dict(tensors), usual(Type.F32), more=texts)


@pytest.mark.parametrize("name", TRUNKS)
@pytest.mark.parametrize("kind", FORMS)
def test_llama_cpp_drafts_the_same(kind: str, name: str, tmp_path: Path) -> None:
    c, trunk = make_config(name, **TRUNKS[name]), make_family(name, **TRUNKS[name])
    trunk.lm_head.weight.data[0] = 0.0  # the end, which the server is told not to say
    raw = SIZES | {"hidden_size": c["hidden_size"], "dflash_config": TAPS} | FORMS[kind]
    weights = make_head(trunk, raw)
    texts = partial(llama_cpp.write_texts, vocab_size=c["vocab_size"])
    files = (
        write_trunk(tmp_path / "t.gguf", c, trunk, texts),
        write_gguf_head(tmp_path / "h.gguf", raw, weights, texts),
    )
    config = find_family(c).config.parse(c)
    plain = PlainBlockHead(trunk, config, raw, weights)
    with llama_cpp.started(kind, *files) as server:
        for length in (5, 19):
            torch.manual_seed(length)
            prompt = torch.randint(4, c["vocab_size"], (length,)).tolist()
            wanted = greedy(trunk, prompt, COUNT)
            llama_cpp.check_drafts(
                server, prompt, wanted, lambda tokens: plain.draft_block(tokens, NEXTN), NEAR
            )
