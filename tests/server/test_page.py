"""The page that the server shows: its markdown, and its scripts, in node, against a server."""

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.page import FILES, MAX_CHARS, render_markdown
from tests.support.live_server import Live, live
from tests.support.served import fails, saying, served

pytestmark = pytest.mark.xdist_group("tiny")
ROOT = Path(__file__).parents[2]
DOM, SERVER = ROOT / "tests/support/page_dom.mjs", ROOT / "runtime/server"
POLICY, RIGHT = "content-security-policy", '<th align="right">a</th>'
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("**a** `b<c`\nd", "<p><strong>a</strong> <code>b&lt;c</code><br>\nd</p>"),
        ("<script>x()</script>", "<p>&lt;script&gt;x()&lt;/script&gt;</p>"),
        ("<b onclick='x()'>", "<p>&lt;b onclick='x()'&gt;</p>"),
        ("[a](javascript:x)", "<p>[a](javascript:x)</p>"),
        ("[a](JaVa&#115;cript:x)", "<p>[a](JaVascript:x)</p>"),
        ("[a](data:text/html,x)", "<p>[a](data:text/html,x)</p>"),
        ("<javascript:x>", "<p>&lt;javascript:x&gt;</p>"),
        (
            '[a](http://b "\\"><i>")',
            '<p><a href="http://b" title="&quot;&gt;&lt;i&gt;" target="_blank"'
            ' rel="noopener noreferrer">a</a></p>',
        ),
        (
            "![a](http://b/c.png)",
            '<p>!<a href="http://b/c.png" target="_blank" rel="noopener noreferrer">a</a></p>',
        ),
        ("```a\" x='\n<b>\n```", '<pre><code class="language-a&quot;">&lt;b&gt;\n</code></pre>'),
        (
            "|a|\n|-:|",
            '<table>\n<thead>\n<tr>\n<th align="right">a</th>\n</tr>\n</thead>\n</table>',
        ),
    ],
)
def test_markdown_is_safe(text: str, html: str) -> None:
    assert render_markdown(text) == html + "\n"


def test_markdown_takes_no_time_squared() -> None:
    began = time.process_time()
    for text in ("[" * 50_000, "![" * 20_000, "*a" * 20_000):
        render_markdown(text)
    assert time.process_time() - began < 4


def test_the_pages_files_need_no_key_and_load_nothing_from_elsewhere() -> None:
    with served(settings=ServerOptions(key="k")) as (server, _), server.client() as client:
        for path, name in FILES.items():
            response = client.get(path)
            assert response.content == (SERVER / name).read_bytes()
            kind = {".html": "html", ".css": "css", ".js": "javascript"}[Path(name).suffix]
            assert response.headers["content-type"].startswith(f"text/{kind}")
            policy = dict(each.split(" ", 1) for each in response.headers[POLICY].split("; "))
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == "'self'"
            assert "://" not in response.text.replace("http://www.w3.org", "")
        assert client.post("/markdown", json={"text": "a"}).status_code == 401


def test_markdown_over_http(client: httpx2.Client) -> None:
    long = client.post("/markdown", json={"text": "a" * (MAX_CHARS + 1)})
    fails(long, 400, "the text has more than 262144 characters", "text")


@pytest.fixture
def play(tmp_path: Path) -> Any:
    """Return play(server, scenario): what a scenario of tests/support/page_dom.mjs returns."""
    for name in ("page.js", "chat.js"):
        shutil.copy(SERVER / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(server: Live, scenario: str, key: str = "") -> Any:
        command: list[str | Path] = ["node", DOM, tmp_path, server.url, key, scenario]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return run


@needs_node
def test_thoughts_are_folded(engine: Engine, play: Any) -> None:
    """Thought and answer stand apart, `</think>` nowhere; turns are sent without their thought."""
    asked = [{"role": "user", "content": "What is 47 + 85?"}]
    whole = engine.generate(engine.chat_ids(asked), SamplingParams(max_tokens=300)).text
    scenario = """
        $("temperature").value = "0";
        await say("What is 47 + 85?");
        await say("And 3 + 4?");
        return {turns: turns(), sent, asked};
    """
    with live(engine, ServerOptions(key="k")) as server:
        told = play(server, scenario, key="k")
    thought, output = whole.split("</think>")
    first, second = told["turns"]
    assert not first["open"]
    assert first["thought"].partition(")")[2] == thought
    assert first["html"] == render_markdown(output)
    assert "132" in first["html"]
    assert "think>" not in json.dumps(told)
    more = [{"role": "assistant", "content": output}, {"role": "user", "content": "And 3 + 4?"}]
    assert [each["messages"] for each in told["sent"]] == [asked, asked + more]
    assert "7" in second["html"]
    assert told["asked"] == ["This server needs an API key"]


def ending(text: str) -> dict[str, Any]:
    """Make an engine say a text, and end."""
    return saying(f"{text}</s>")


@needs_node
def test_a_new_chat_gets_nothing_of_the_answer_that_runs(play: Any) -> None:
    scenario = """
        begin("hi");
        await until(() => turns()[0]?.html?.includes("long"));
        $("new").click();
        const empty = turns();
        await idle();
        const [kept] = chat.load(localStorage);
        const stored = chat.textOf(kept.turns[0]);
        begin("ho");
        await until(() => turns()[0]?.html?.includes("long"));
        $("ask").requestSubmit();  // Stop
        await idle();
        const second = turns();
        await click("hi");
        const first = turns(), {server_load} = await (await fetch("load")).json();
        $("new").click();
        begin("left");
        await until(() => turns()[0]?.html?.includes("long"));
        await open();
        const note = kept.turns[0].note;
        return {empty, stored, note, second, first, sent, server_load, left: turns()};
    """
    with served(**saying("a long answer "), step_s=0.01) as (server, _):
        told = play(server, scenario)
    assert told["empty"] == []
    assert told["stored"].startswith("a long")
    assert told["note"] == "stopped"
    (second,) = told["second"]
    assert (second["question"], second["note"]) == ("ho", "stopped")
    assert [len(each["messages"]) for each in told["sent"]] == [1, 1, 1]
    assert told["server_load"] == 0
    (left,) = told["left"]
    assert "a long" in left["html"]
    (first,) = told["first"]
    assert first["html"] == render_markdown(told["stored"])


@needs_node
def test_a_reload_changes_nothing(play: Any) -> None:
    scenario = """
        $("system").value = "be kind";
        $("system").listeners.input();
        await say("hello [there]");
        await say("ho");
        const before = turns();
        await open();
        const after = turns(), system = $("system").value;
        await say("more");
        const list = $("chats").children.map((row) => row.textContent);
        $("new").click();
        await click("×");
        return {before, after, system, sent, list, asked, left: localStorage.length};
    """
    with served(**ending("*so*")) as (server, _):
        told = play(server, scenario)
    assert len(told["before"]) == 2
    assert told["after"] == told["before"]
    assert told["system"] == "be kind"
    assert told["list"] == ["hello [there]×"]
    assert (told["asked"], told["left"]) == (["Delete “hello [there]”?"], 0)


@needs_node
def test_questions_are_asked_again_and_changed(play: Any) -> None:
    scenario = """
        await say("one");
        await say("two");
        await click("Regenerate");
        await click("Edit");
        const draft = $("text").value, dimmed = $("turns").children.at(-1).className;
        $("cancel").click();
        const left = $("text").value;
        $("turns").children[1].children[1].children[1].click();  // Edit of the first
        await say("three");
        return {draft, dimmed, left, sent, turns: turns()};
    """
    with served(**ending("so")) as (server, _):
        told = play(server, scenario)
    asked = [[m["content"] for m in each["messages"][::2]] for each in told["sent"]]
    assert asked == [["one"], ["one", "two"], ["one", "two"], ["three"]]
    assert (told["draft"], told["dimmed"], told["left"]) == ("two", "answer replaced", "")
    assert [turn["question"] for turn in told["turns"]] == ["three"]


@needs_node
def test_a_full_context_ends_no_conversation(play: Any) -> None:
    """Old turns are left out with a line; a question that is too long alone has its error."""
    scenario = """
        for (const word of ["one", "two", "three", "four", "five"]) await say(word);
        const full = turns();
        await say("long ".repeat(80));
        const error = turns().at(-1).error;
        await say("six");
        return {full, error, sent, turns: turns()};
    """
    with served(**ending("an answer of some length"), max_seq_len=120) as (server, _):
        told = play(server, scenario)
    (cut,) = [turn for turn in told["full"] if "cut" in turn]
    assert cut["cut"].startswith("The context is full")
    assert told["full"].index(cut) > 0
    assert all(turn["html"] for turn in told["full"] if turn != cut)
    assert "maximum context length is 120 tokens" in told["error"]
    last = told["turns"][-1]
    assert (last["question"], bool(last["html"]), "error" in last) == ("six", True, False)
    sent = [message["content"] for message in told["sent"][-1]["messages"]]
    assert "long" not in " ".join(sent)
    assert sent[::2][-2:] == ["five", "six"], "the question that was too long drops no turn"


@needs_node
def test_what_goes_wrong_is_shown_in_the_answers_place(play: Any) -> None:
    scenario = """
        const network = globalThis.fetch;
        globalThis.fetch = () => { throw new TypeError("gone"); };
        const gone = await say("hi");
        globalThis.fetch = network;
        localStorage.room = 5;
        await click("Regenerate");
        return {gone: gone.error, after: turns(), notice: $("notice").textContent};
    """
    with served(**ending("so")) as (server, _):
        told = play(server, scenario)
    assert told["gone"] == "no answer from the server (gone)"
    (after,) = told["after"]
    assert "error" not in after
    assert after["html"] == "<p>so</p>\n"
    assert told["notice"].startswith("The browser's storage is full")


@needs_node
def test_an_empty_answer_is_said_and_not_sent(play: Any) -> None:
    with served(**ending("")) as (server, _):
        told = play(server, 'await say("hi"); await say("ho"); return {turns: turns(), sent};')
    assert [turn["note"] for turn in told["turns"]] == ["the answer is empty"] * 2
    assert [len(each["messages"]) for each in told["sent"]] == [1, 1]


@needs_node
def test_rendered_text_finds_its_tokens(play: Any) -> None:
    """Marks of markdown belong to no text; what rendering adds belongs to the token before it."""
    parts = ["**b", "ol", "d**", " [li", "nk](http://x)", " & e", "nd"]
    spans = [[part, draft] for part, draft in zip(parts, (0, 1, 2, 0, 1, 0, 1), strict=True)]
    texts = ["bold", " ", "link", " & end", "✓"]
    scenario = """
        const spans = SPANS, cut = chat.makeCutter(spans);
        const number = (span) => spans.indexOf(span);
        return TEXTS.map((text) => cut(text).map(([part, span]) => [part, number(span)]));
    """.replace("SPANS", json.dumps(spans)).replace("TEXTS", json.dumps(texts))
    with served() as (server, _):
        told = play(server, scenario)
    assert told == [
        [["b", 0], ["ol", 1], ["d", 2]],
        [[" ", 2]],
        [["li", 3], ["nk", 4]],
        [[" ", 4], ["& e", 5], ["nd", 6]],
        [["✓", 6]],
    ]
