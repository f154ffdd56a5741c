"""GGUF files of Gemma-4 and its assistant are read as the checkpoints that they were made from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.head import open_head, read_head_config
from tests.support.gemma4 import SHAPES, make_assistant, make_trunk, save
from tests.support.gemma4_gguf import write_head, write_trunk

EPS = 2**-17  # a file has it in fp32


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_and_configuration(shape: str, tmp_path: Path) -> None:
    trunk = make_trunk(shape, rms_norm_eps=EPS)
    folder = find_model(str(write_trunk(tmp_path / "a.gguf", trunk))).folder
    stored = save(trunk, tmp_path / "stored")
    config = load_config(folder)
    assert config == load_config(stored)
    read, wanted = open_checkpoint(folder), open_checkpoint(stored)
    read.check(config)
    assert read.tensors.keys() == wanted.tensors.keys()
    for name in wanted.tensors:
        assert torch.equal(read.read(name), wanted.read(name)), name


@pytest.mark.parametrize("others", [False, True])
def test_an_assistant_is_the_one_that_it_was_made_from(others: bool, tmp_path: Path) -> None:
    folder = save(make_trunk("small", rms_norm_eps=EPS), tmp_path / "trunk")
    head = make_assistant("small", rms_norm_eps=EPS)
    file = write_head(tmp_path / "head.gguf", head, others=others)
    places, config = (save(head, tmp_path / "head"), file), load_config(folder)
    first, second = (read_head_config(place, folder, config) for place in places)
    assert first.head is not None
    # A head has no keys whose values could be the same.
    same: Any = replace(first.head, attention_k_eq_v=True)  # type: ignore[call-arg]
    assert replace(first, head=same) == second
    wanted, read = (open_head(place, config) for place in places)
    assert wanted.tensors.keys() == read.tensors.keys()
    for name in wanted.tensors:
        assert torch.equal(wanted.read(name), read.read(name)), name
