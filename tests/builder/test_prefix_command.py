"""`mtpbuild prefix`: what it puts into an engine, and what it refuses."""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpbuild.builder.compiler.prefixes import Beginning
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import MANIFEST, WEIGHTS, check_files, read_manifest
from mtpbuild.runtime.prefix_cache.tree import count_common
from mtpbuild.runtime.text.tokenizer import load_tokenizer
from tests.support.invoke import invoke, refusal

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
    shown, before = (" ".join(invoke("inspect", f)[1].split()) for f in (engine, tiny_engine(3)))
    assert "prefixes built in: assistant, few; of earlier prompts 7,360 bytes per token" in shown
    assert "prefixes built in: none; of" in before
    needs = re.compile(r"needs (.*) capabilities")
    assert needs.findall(shown) == needs.findall(before), "a prefix is no weight"
    check_files(engine, read_manifest(engine), verify_hashes=True)

    chats = [
        [{"role": "system", "content": SYSTEM}, QUESTION],
        [QUESTION, {"role": "assistant", "content": "132"}, {"role": "user", "content": "And 5?"}],
    ]
    params = SamplingParams(max_tokens=24, logprobs=2)
    with (
        Engine.load(tiny_engine(3), prefix_cache=False) as cold,
        Engine.load(engine, prefix_cache=False) as warm,
    ):
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


def modes(engine: Path, *names: str) -> list[int]:
    return [stat.S_IMODE((engine / name).stat().st_mode) for name in names]


def test_a_prefix_has_its_engines_mode(engine: Path, tmp_path: Path) -> None:
    """Whoever may load an engine may load it afterwards, whatever the umask of who added to it."""
    (tmp_path / "text").write_text(SYSTEM)
    engine.chmod(0o755)
    (engine / MANIFEST).chmod(0o644)
    (engine / WEIGHTS).chmod(0o640)
    places = ".", "prefixes", MANIFEST, WEIGHTS, "prefixes/a.safetensors"
    asked = "prefix", "add", "--engine", engine, "--file", tmp_path / "text", "--name"
    before = os.umask(0o077)
    try:
        assert invoke(*asked, "a")[0] == 0
        assert modes(engine, *places) == [0o755, 0o755, 0o644, 0o640, 0o644]
        assert invoke(*asked, "a", "--private")[0] == 0
        assert modes(engine, *places) == [0o755, 0o755, 0o644, 0o640, 0o600]
        assert invoke(*asked, "b")[0] == 0
        assert modes(engine, *places, "prefixes/b.safetensors")[-2:] == [0o600, 0o644]
        assert invoke("prefix", "remove", "--engine", engine, "--name", "b")[0] == 0
        assert modes(engine, *places) == [0o755, 0o755, 0o644, 0o640, 0o600]
    finally:
        os.umask(before)


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
        assert count_common(whole, begun) == len(begun), content


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--name x", "give --file or --messages"),
        ("--name ../x --file FILE", "prefix ../x: a name has 1 to 64"),
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
    assert says in refusal("prefix", "add", "--engine", folder, *flags.split())
    assert not (folder / "prefixes").exists()


def test_a_build_computes_prefixes(engine: Path, tmp_path: Path) -> None:
    """One that finds its engine built keeps those that it has."""
    (tmp_path / "system.txt").write_text(SYSTEM)
    few = [QUESTION, {"role": "assistant", "content": "132"}]
    (tmp_path / "few.json").write_text(json.dumps({"messages": few}))
    words = "build --model deepseek-tiny --nextn 3 --max-batch 4 --prefill-chunk 32"
    command = words.split()
    flags = [flag for name in ("system.txt", "few.json") for flag in ("--prefix", tmp_path / name)]
    code, _, err = invoke(*command, "--out", engine, *flags)
    assert code == 0, err
    assert invoke(*command, "--out", engine)[0] == 0
    with Engine.load(engine, threads=1, prefix_cache=False) as loaded:
        text, chat = loaded.encode(SYSTEM), loaded.chat_ids([*few, QUESTION])
        ahead = loaded.manifest.lookahead
        params = SamplingParams(max_tokens=1)
        results = [loaded.generate(ids, params) for ids in ([*text, 9, 10, 11, 12], chat)]
    shown = json.loads(invoke("prefix", "list", "--engine", engine, "--json")[1])
    counts = {each["name"]: each["tokens"] for each in shown}
    assert list(counts) == ["few", "system"]
    assert counts["system"] == len(text)
    cached = [result.metrics.cached_tokens for result in results]
    assert cached == [counts["system"] - ahead, counts["few"] - ahead]
