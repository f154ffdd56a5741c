"""`mtpbuild prefix`: what it puts into an engine, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpbuild.builder.prefixes import Beginning
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import check_files, read_manifest
from mtpbuild.runtime.prefixes import common
from mtpbuild.runtime.tokenizer import load_tokenizer
from tests.support.invoke import invoke

pytestmark = pytest.mark.xdist_group("tiny")
SYSTEM = "You add and sort numbers. Say what you do, and end with the answer. " * 8
QUESTION = {"role": "user", "content": "What is 47 + 85?"}


@pytest.fixture
def engine(tiny_engine: Callable[..., Path], tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_engine(3), folder)
    return folder


def test_add_list_and_remove(
    engine: Path, tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    """A chat behind a prefix is answered as without it, to the bit: the engine is exact."""
    (tmp_path / "system.txt").write_text(SYSTEM)
    (tmp_path / "few.json").write_text(
        json.dumps([QUESTION, {"role": "assistant", "content": "132"}])
    )
    asked = "prefix", "add", "--engine", engine, "--name"
    code, out, err = invoke(*asked, "assistant", "--file", tmp_path / "system.txt", "--chat")
    assert code == 0, err
    assert "prefix assistant," in out
    assert invoke(*asked, "few", "--messages", tmp_path / "few.json")[0] == 0
    code, out, _ = invoke("prefix", "list", "--engine", engine, "--json")
    counts = {each["name"]: each["tokens"] for each in json.loads(out)}
    assert list(counts) == ["assistant", "few"]
    assert invoke("inspect", engine)[0] == 0
    check_files(engine, read_manifest(engine), verify_hashes=True)

    chats = [
        [{"role": "system", "content": SYSTEM}, QUESTION],
        [QUESTION, {"role": "assistant", "content": "132"}, {"role": "user", "content": "And 5?"}],
    ]
    params = SamplingParams(max_tokens=24, logprobs=2)
    with Engine.load(tiny_engine(3)) as cold, Engine.load(engine) as warm:
        assert warm.manifest.build.exact
        for chat, name in zip(chats, counts, strict=True):
            one, other = warm.chat(chat, params), cold.chat(chat, params)
            assert (one.token_ids, one.from_draft) == (other.token_ids, other.from_draft)
            assert one.logprobs == other.logprobs
            assert one.metrics.cached_tokens == counts[name] - warm.manifest.lookahead
            assert other.metrics.cached_tokens == 0

    for name in counts:
        assert invoke("prefix", "remove", "--engine", engine, "--name", name)[0] == 0
    assert read_manifest(engine) == read_manifest(tiny_engine(3))
    code, _, err = invoke("prefix", "remove", "--engine", engine, "--name", "few")
    assert code == 2
    assert "has no prefix few (it has: none)" in err


def test_a_token_that_spans_the_border_ends_the_match(tiny_engine: Callable[..., Path]) -> None:
    """A chat's prefix ends before anything that depends on what the user says."""
    folder = tiny_engine(3)
    tokenizer = load_tokenizer(folder, read_manifest(folder))
    assert tokenizer is not None
    begun = Beginning(SYSTEM, chat=True).tokens(tokenizer)
    for content in ("What is 2 + 2?", "7", " x", "\n", "é", "(a)"):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
        text = tokenizer.chat_prompt(messages)
        whole = tokenizer.encode(text, add_special_tokens=False)
        assert common(whole, begun) == len(begun), content


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--name x", "give --file or --messages"),
        ("--name ../x --file FILE", "--name ../x: letters, digits"),
        ("--name x --file missing.txt", "missing.txt: can't be read"),
        ("--name x --messages FILE", "can't be read"),
        ("--name x --file LONG", "this engine takes"),
        ("--name x --file EMPTY", "this engine takes"),
    ],
)
def test_refusals(flags: str, says: str, tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_engine(3)
    for name, text in {"FILE": "hello", "LONG": "a b c d " * 9000, "EMPTY": ""}.items():
        (tmp_path / name).write_text(text)
        flags = flags.replace(name, str(tmp_path / name))
    code, _, err = invoke("prefix", "add", "--engine", folder, *flags.split())
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not (folder / "prefixes").exists()
