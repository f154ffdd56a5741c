"""The token that ends texts is found wherever a checkpoint's files name it."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.checkpoint.generation import read_generation_ids
from mtpbuild.builder.models import find_family
from tests.support.checkpoints import BASE

CONFIG = find_family(BASE).parse_config(BASE)
DECODER = {"7": {"content": "<end>", "special": True}}
ADDED = [{"id": 7, "content": "<end>", "special": True}]
VOCABULARY = {"model": {"type": "BPE", "vocab": {"a": 0, "<end>": 7}}, "added_tokens": []}


def tokenizer(added: Any = (), **model: Any) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {"a": 0}} | model, "added_tokens": [*added]}


END = {"eos_token": "<end>"}
OTHER = {"eos_token": {"content": "<other>"}}
BOTH = [*ADDED, {"id": 9, "content": "<other>", "special": True}]
# What tokenizer_config.json, special_tokens_map.json and tokenizer.json hold, and the ids.
FILES: dict[str, tuple[Any, Any, Any, tuple[int, ...]]] = {
    "an added token": (END, None, tokenizer(ADDED), (7,)),
    "an object": ({"eos_token": {"content": "<end>"}}, None, tokenizer(ADDED), (7,)),
    "the older file alone": (None, END, tokenizer(ADDED), (7,)),
    "the older file beside another": ({"bos_token": "a"}, END, tokenizer(ADDED), (7,)),
    "the older file, added tokens": ({"added_tokens_decoder": DECODER}, END, tokenizer(), (7,)),
    "the older file, null": ({"eos_token": None}, END, tokenizer(ADDED), (7,)),
    "the vocabulary alone": (END, None, VOCABULARY, (7,)),
    "the vocabulary and the older file": (None, END, VOCABULARY, (7,)),
    "added_tokens_decoder": (END | {"added_tokens_decoder": DECODER}, None, tokenizer(), (7,)),
    "no tokenizer.json": (END | {"added_tokens_decoder": DECODER}, None, None, (7,)),
    "of both the older one": (END, OTHER, tokenizer(BOTH), (9,)),
    "of both the one with added tokens": (
        END | {"added_tokens_decoder": DECODER}, OTHER, tokenizer(BOTH), (7,),
    ),
    "nowhere": ({}, {}, tokenizer(ADDED), ()),
    "beyond the vocabulary": (END, None, tokenizer([{"id": 61, "content": "<end>"}]), ()),
    "damaged": (END | {"added_tokens_decoder": [1]}, None, tokenizer(ADDED), (7,)),
    "a damaged vocabulary": (END, None, tokenizer(vocab={"<end>": "x"}), ()),
    "a list": (END, None, tokenizer(vocab=[["<end>", 0.5]]), ()),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_the_end_is_found(case: str, tmp_path: Path) -> None:
    config, older, made, wanted = FILES[case]
    names = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")
    for name, content in zip(names, (config, older, made), strict=True):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert read_generation_ids(tmp_path, CONFIG).eos_token_ids == wanted
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert read_generation_ids(tmp_path, CONFIG).eos_token_ids == (3, *wanted)


@pytest.mark.parametrize("place", ["added", "vocabulary", "decoder"])
def test_marks_of_thoughts(place: str, tmp_path: Path) -> None:
    marks = {"<think>": 5, "</think>": 6}
    if place == "decoder":
        listed = {str(id): {"content": text} for text, id in marks.items()}
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"added_tokens_decoder": listed})
        )
    added = [{"id": id, "content": text} for text, id in marks.items()]
    made = tokenizer(added if place == "added" else ())
    made["model"]["vocab"] |= marks if place == "vocabulary" else {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    assert read_generation_ids(tmp_path, CONFIG).thinking_token_ids == (5, 6)
