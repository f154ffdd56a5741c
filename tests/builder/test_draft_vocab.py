"""Drafts from a reduced vocabulary: the text is exact, and drafts are the head's best of them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from mtpbuild.builder.compiler.draft_vocab import DRAFT_VOCAB, draft_ids, list_most_frequent
from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.controls import StepControls
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.programs import load_programs
from tests.reference.recompute import greedy
from tests.reference.sampling import sample
from tests.support.engines import greedy_ids
from tests.support.families import make_family, save_family
from tests.support.forced import DRAFTS, check_programs
from tests.support.requests import build, build_request
from tests.support.steps import check_family

CHUNK = 16
IDS = tuple(range(2, 60, 2))


@pytest.mark.parametrize(
    ("name", "nextn", "drafter"),
    [
        ("glm-flash", 2, "mtp-vanilla"),
        pytest.param("qwen3.5", 3, "mtp-eagle", marks=pytest.mark.full),
    ],
)
def test_every_step_equals_recomputation(name: str, nextn: int, drafter: Any) -> None:
    torch.set_num_threads(1)
    model = make_family(name)
    model.config = replace(model.config, draft_ids=IDS)
    check_family(model, nextn, drafter, accepts_all=False)
    with pytest.raises(AssertionError, match=f"^{DRAFTS}"):
        check_family(model, nextn, drafter, rows_of_other_tokens, accepts_all=False)


def rows_of_other_tokens(model: CausalLM) -> None:
    model.draft_ids.add_(1)


@pytest.mark.full
def test_an_engine(tmp_path: Path) -> None:
    """Text is the model's own, greedy and sampled; drafts are the plain model's best of the ids."""
    torch.set_num_threads(1)
    ours = make_family("glm-flash", hidden_size=32)
    folder = save_family(tmp_path / "flash", "glm-flash", ours, hidden_size=32)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(IDS))
    flags = {"draft_vocab": str(ids), "prefill_chunk": CHUNK, "out": tmp_path / "reduced"}
    (built,) = build(build_request(folder, (1,), **flags))
    assert built.manifest.build.draft_vocab == len(IDS)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, n).tolist() for n in (1, 2, 17, 30)]
    texts = greedy_ids(built.folder, prompts, 30)
    assert texts == [greedy(ours, prompt, 30) for prompt in prompts]
    sampled = SamplingParams(max_tokens=30, temperature=0.8, seed=5, ignore_eos=True)
    with Engine.load(built.folder, threads=1) as loaded:
        texts = [list(r.token_ids) for r in loaded.generate(prompts, sampled)]
    asked = StepControls(temperature=0.8, seed=5)
    assert texts == [sample(ours, prompt, 30, asked) for prompt in prompts]

    refitted = make_family("glm-flash", seed=1, hidden_size=32)
    new = save_family(tmp_path / "new", "glm-flash", refitted, hidden_size=32)
    for model, lengths in ((ours, (11, 1, CHUNK + 1)), (refitted, (3,))):
        if model is refitted:
            refit(built.folder, str(new))
        model.config = replace(model.config, draft_ids=IDS)
        programs = load_programs(built.folder, read_manifest(built.folder), threads=1)
        check_programs(programs, model, 1, "mtp-vanilla", CHUNK, lengths, 6, every=False)
    assert json.loads((built.folder / DRAFT_VOCAB).read_text()) == list(IDS)


def train(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the cat saw the other cat then the thing slept there"
    tokenizer.train_from_iterator([text] * 20, trainer)
    tokenizer.add_tokens(["<late>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_the_most_frequent_tokens(tmp_path: Path) -> None:
    """Added tokens first, then bytes, then what was merged early."""
    tokenizer = train(tmp_path)
    size = tokenizer.get_vocab_size()
    order = list(list_most_frequent(tmp_path / "tokenizer.json", size))
    assert sorted(order) == list(range(size))
    assert {tokenizer.id_to_token(id) for id in order[:2]} == {"<eos>", "<late>"}
    rank = {tokenizer.id_to_token(id): place for place, id in enumerate(order)}
    assert max(rank[char] for char in pre_tokenizers.ByteLevel.alphabet()) < rank["th"]
    assert rank["th"] < rank["the"] < rank["Ġother"]
    assert draft_ids("260", tmp_path, size) == tuple(sorted(order[:260]))


@pytest.mark.parametrize(
    ("name", "content"), [("ids.json", "[5, 3, 5]"), ("ids.txt", "5\n3\n"), ("ids.pt", None)]
)
def test_files_of_ids(name: str, content: str | None, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is None:
        torch.save(torch.tensor([5, 3]), path)
    else:
        path.write_text(content)
    assert draft_ids(str(path), tmp_path, 10) == (3, 5)


@pytest.mark.parametrize(
    ("asked", "content", "says"),
    [
        ("0", "", "--draft-vocab 0 is outside 1..60"),
        ("61", "", "--draft-vocab 61 is outside 1..60"),
        ("7", "", "needs a file of token ids"),
        ("gone.json", "", "neither a number nor a file"),
        ("²", "", "neither a number nor a file"),
        ("ids.json", "[1, 61]", "61 is not a token id below 61"),
        ("ids.json", "[1, true]", "True is not a token id below 61"),
        ("ids.json", "{}", "no list of token ids"),
        ("ids.txt", "one two", "no list of token ids"),
        ("ids.txt", " ", "names 0 of 61 tokens"),
        ("ids.pt", "x", "no list of token ids"),
    ],
)
def test_refusals(asked: str, content: str, says: str, tmp_path: Path) -> None:
    if content:
        (tmp_path / asked).write_text(content)
    with pytest.raises(UsageError, match=re.escape(says)):
        draft_ids(asked if asked.isdigit() else str(tmp_path / asked), tmp_path, 61)
