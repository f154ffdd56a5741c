"""The page: self-contained, its data equal to the trace, nothing in it taken for HTML."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.lab.measure.runs import run_prompts
from mtpbuild.lab.measure.statistics import sum_drafting
from mtpbuild.runtime import Engine, SamplingParams, Trace
from mtpbuild.runtime.cli.terminal import summary
from mtpbuild.runtime.text.tokenizer import Tokenizer
from mtpbuild.runtime.trace.page import Speller
from tests.support.fakes import (
    EOS,
    FakePrograms,
    backend_tokenizer,
    fake_engine,
    fake_manifest,
    fake_tokenizer,
    scripted,
)

NASTY = "</script><script>alert(1)</script><!-- é漢🚀\n\tx  y"


def nasty_engine() -> tuple[Engine, list[int]]:
    """Say NASTY, then the end of sequence; the drafts after it are wrong."""
    output = [*fake_tokenizer().encode(NASTY, add_special_tokens=False), EOS]
    engine, _ = fake_engine(
        next_token=scripted(1, output), draft_is_right=lambda position: position % 5 != 0
    )
    return engine, output


class Scripts(HTMLParser):
    """The elements as a browser takes them apart: (attributes, content) of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self._inside = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


def page_data(page: str) -> Any:
    found = Scripts(page)
    (data,) = [text for attributes, text in found.scripts if attributes.get("id") == "data"]
    assert len(found.scripts) == 2
    return json.loads(data)


@pytest.fixture
def traced(tmp_path: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return a page, and the lines of the same run."""
    engine, output = nasty_engine()
    params = SamplingParams(max_tokens=60, stop=["never"])
    with engine, Trace(engine, tmp_path / "a.html", tmp_path / "a.jsonl") as trace:
        for name in ("<b>", "second"):
            result = engine.stream([7], params, observer=trace.request(name)).result()
            assert (result.token_ids, result.text) == (output, NASTY)
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    return (tmp_path / "a.html").read_text(encoding="utf-8"), [json.loads(x) for x in lines]


def test_the_data_is_the_trace(traced: tuple[str, list[dict[str, Any]]]) -> None:
    page, lines = traced
    found = []
    for request in page_data(page):
        del request["request"]["texts"], request["request"]["settings"]
        for step in request["steps"]:
            del step["texts"], step["draft_texts"]
        found += [request["request"], *request["steps"], request["end"]]
    assert found == lines[:-1]


@pytest.mark.parametrize(("tokens", "length"), [(3, 3 / 2), (9, 9 / 3), (10, 10 / 4)])
def test_the_acceptance_length_is_that_of_the_terminal(
    tokens: int, length: float, tmp_path: Path
) -> None:
    """Tokens that the end cuts off count nowhere."""
    engine, _ = fake_engine(nextn=3)
    params = SamplingParams(tokens, ignore_eos=True)
    with engine, Trace(engine, tmp_path / "a.html") as trace:
        result = engine.stream([5], params, observer=trace.request()).result()
        (answer,) = run_prompts(engine, [[5]], [params])
    (request,) = page_data(page := (tmp_path / "a.html").read_text(encoding="utf-8"))
    assert f"acceptance length {length:.2f}" in summary(result)
    assert request["acceptance_length"] == length
    assert sum_drafting([answer]).mean_acceptance_length == length
    assert re.search(r"\[fixed\(acceptance_length, 2\), \"acceptance length\"\]", page)


def test_settings_that_bear_on_the_text_are_shown(tmp_path: Path) -> None:
    """Those that are not the usual ones, whatever they are called."""
    engine, _ = nasty_engine()
    kept: dict[str, Any] = {"stop": ["never"], "include_stop_str_in_output": True}
    params = SamplingParams(9, temperature=0.5, seed=3, logprobs=2, timeout=60, **kept)
    with engine, Trace(engine, tmp_path / "a.html") as trace:
        engine.stream([7], params, observer=trace.request()).result()
    (request,) = page_data((tmp_path / "a.html").read_text(encoding="utf-8"))
    shown = {"max_tokens": 9, "temperature": 0.5, "seed": 3}
    assert request["request"]["settings"] == shown | kept


def test_the_texts_are_the_text(traced: tuple[str, list[dict[str, Any]]]) -> None:
    """Each token's piece, put together, is what the request gave; drafts stand beside theirs."""
    page, _ = traced
    for request in page_data(page):
        texts = [text for step in request["steps"] for text in step["texts"]]
        kept = texts[: request["end"]["output_tokens"]]
        assert "".join(text for kind, text in kept if kind == "text") == NASTY
        assert kept[-1] == ["special", "</s>"]
        assert sum(text == "" for kind, text in kept) >= 5  # beginnings of characters
        for step in request["steps"]:
            assert len(step["texts"]) == step["n"]
            assert len(step["draft_texts"]) == step["num_drafts"]
    assert any(step["num_drafts"] >= step["n"] for step in request["steps"])


def test_text_is_never_markup(traced: tuple[str, list[dict[str, Any]]]) -> None:
    page, _ = traced
    assert "alert(1)" not in Scripts(page).scripts[1][1]
    assert "<b>" not in page
    (script,) = [t for a, t in Scripts(page).scripts if "id" not in a]
    assert "innerHTML" not in script
    assert "insertAdjacentHTML" not in script


def test_the_page_loads_nothing(traced: tuple[str, list[dict[str, Any]]]) -> None:
    page, _ = traced
    found = Scripts(page)
    assert not {"link", "img", "iframe"} & set(found.tags)
    assert all("src" not in attributes for attributes, _ in found.scripts)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", page)
    urls = set(re.findall(r"https?://[^\"' ]+", page))
    assert urls == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_without_a_tokenizer_ids_are_shown(tmp_path: Path) -> None:
    manifest = fake_manifest()
    engine = Engine(FakePrograms(manifest), manifest)
    with engine, Trace(engine, tmp_path / "a.html") as trace:
        result = engine.stream([5], observer=trace.request()).result()
    (request,) = page_data((tmp_path / "a.html").read_text(encoding="utf-8"))
    texts = [text for step in request["steps"] for text in step["texts"]]
    assert texts[: len(result.token_ids)] == [["id", str(token)] for token in result.token_ids]


def test_a_page_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text("old", encoding="utf-8")
    engine, _ = nasty_engine()
    with engine, Trace(engine, path) as trace:
        assert path.read_text(encoding="utf-8") == "old"
        engine.stream([7], observer=trace.request()).result()
        assert path.read_text(encoding="utf-8") == "old"
    assert page_data(path.read_text(encoding="utf-8"))
    assert list(tmp_path.iterdir()) == [path]


def test_characters_over_several_tokens() -> None:
    backend = backend_tokenizer()
    speller = Speller(Tokenizer(backend))
    ids = backend.encode("é", add_special_tokens=False).ids
    assert [speller.next(id) for id in ids] == [*[("text", "")] * (len(ids) - 1), ("text", "é")]
    assert len(ids) == 2
    assert speller.next(ids[1]) == ("text", "\ufffd")
    assert speller.next(EOS) == ("special", "</s>")
