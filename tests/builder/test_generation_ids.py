"""Tokens that end texts and bound thoughts are found wherever a checkpoint's files name them."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.checkpoint.generation import read_generation_ids
from mtpbuild.builder.models import find_family
from tests.support.checkpoints import BASE

TEXTS = {"<end>": 7, "<think>": 5, "</think>": 6, "<other>": 9}
LISTED = {"added_tokens_decoder": {str(id): {"content": text} for text, id in TEXTS.items()}}
ADDED = {"added_tokens": [{"id": id, "content": text} for text, id in TEXTS.items()]}
VOCABULARY = {"model": {"vocab": {"a": 0} | TEXTS}, "added_tokens": []}
BARE = {"model": {"vocab": {"a": 0}}, "added_tokens": []}
END, OTHER = {"eos_token": "<end>"}, {"eos_token": {"content": "<other>"}}
# What tokenizer_config.json, special_tokens_map.json and tokenizer.json hold, and the ends.
FILES: dict[str, tuple[Any, Any, Any, tuple[int, ...]]] = {
    "an added token": (END, None, ADDED, (7,)),
    "the older file alone": (None, END, ADDED, (7,)),
    "the older file, added tokens": (LISTED, END, BARE, (7,)),
    "the older file, null": ({"eos_token": None}, END, ADDED, (7,)),
    "the vocabulary": (END, None, VOCABULARY, (7,)),
    "added_tokens_decoder": (END | LISTED, None, BARE, (7,)),
    "no tokenizer.json": (END | LISTED, None, None, (7,)),
    "of both the older one": (END, OTHER, ADDED, (9,)),
    "of both the one with added tokens": (END | LISTED, OTHER, ADDED, (7,)),
    "nowhere": ({}, {}, ADDED, ()),
    "damaged": (END | {"added_tokens_decoder": [1]}, None, ADDED, (7,)),
    "beyond the vocabulary": (END, None, {"model": {"vocab": {"<end>": 61}}}, ()),
    "pieces with scores": (END, None, {"model": {"vocab": [["<end>", 0.5]]}}, ()),
}


@pytest.mark.parametrize("case", FILES)
def test_the_end_is_found(case: str, tmp_path: Path) -> None:
    names = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")
    for name, content in zip(names, FILES[case][:3], strict=True):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    config, wanted = find_family(BASE).config.parse(BASE), FILES[case][3]
    found = read_generation_ids(tmp_path, config)
    assert found.eos_token_ids == wanted
    assert found.thinking_token_ids == ((5, 6) if "<think>" in str(FILES[case]) else None)
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert read_generation_ids(tmp_path, config).eos_token_ids == (3, *wanted)
