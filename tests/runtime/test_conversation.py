"""A conversation's turns, settings and commands, without a terminal."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.runtime import ChatResult, EngineError, SamplingParams
from mtpbuild.runtime.cli.conversation import COMMANDS, Conversation
from mtpbuild.runtime.configuration.input_file import read_requests
from mtpbuild.runtime.engine.loaded import Prompt
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.text.chat_template import ChatTemplates, TemplateText
from mtpbuild.runtime.text.tokenizer import Tokenizer
from tests.support.fakes import EOS, backend_tokenizer, fake_engine, fake_tokenizer, scripted

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


class Talk:
    """A conversation, the prompts that were answered and the lines that were said."""

    def __init__(self, params: SamplingParams | None = None, **options: Any) -> None:
        options.setdefault("max_seq_len", 4000)
        tokenizer = options.pop("tokenizer", None) or templated(PLAIN)
        opening = {name: options.pop(name) for name in ("system",) if name in options}
        self.engine, self.programs = fake_engine(tokenizer, **options)
        self.prompts, self.params = list[str](), list[SamplingParams]()
        self.said = list[str]()
        params = params or SamplingParams(3)
        self.now = Conversation(self.engine, params, self.answer, self.said.append, **opening)

    def answer(self, prompt: Prompt, params: SamplingParams) -> ChatResult:
        tokenizer = self.engine.tokenizer
        assert tokenizer
        self.prompts.append(prompt if isinstance(prompt, str) else tokenizer.text(prompt))
        self.params.append(params)
        return self.engine.chat(prompt, params)

    def __call__(self, *lines: str) -> str:
        """Take these lines; return what was said since the last call."""
        self.said.clear()
        for line in lines:
            self.now.take(line)
        return "\n".join(self.said)

    @property
    def questions(self) -> list[str]:
        return [m["content"] for m in self.now.turns.messages if m["role"] == "user"]


def templated(template: str) -> Tokenizer:
    """Make the fakes' tokenizer with another chat template."""
    text = TemplateText("chat_template.jinja", template)
    return Tokenizer(backend_tokenizer(), chat_template=ChatTemplates({"default": text}))


def test_turns_follow_each_other() -> None:
    talk = Talk()
    assert talk("hello", "two\nlines") == ""
    first, second = (m["content"] for m in talk.now.turns.messages if m["role"] == "assistant")
    assert talk.prompts == [
        "[user] hello\n",
        f"[user] hello\n[assistant] {first}\n[user] two\nlines\n",
    ]
    assert second


def test_texts_without_a_chat_template_do_not_build_on_each_other() -> None:
    talk = Talk(tokenizer=Tokenizer(backend_tokenizer()))
    talk("hello", "more")
    assert talk.prompts == ["hello", "more"]
    assert talk.questions == ["more"]
    assert "no chat_template.jinja" in talk("/system s")
    assert talk.now.system is None
    with pytest.raises(RequestError, match=r"no chat_template\.jinja"):
        Talk(tokenizer=Tokenizer(backend_tokenizer()), system="s")


def test_the_system_message() -> None:
    talk = Talk(system="Be brief.")
    talk("a", "/system Be\nlong.", "b", "/system", "c")
    begun = [prompt.partition("\n[user]")[0] for prompt in talk.prompts[:2]]
    assert begun == ["[system] Be brief.", "[system] Be\nlong."]
    assert "system" not in talk.prompts[2]
    picky = Talk(tokenizer=fake_tokenizer())  # its template refuses the role
    assert "no role system" in picky("/system s")
    assert picky("hello") == ""


def test_a_full_context_drops_the_oldest_turns_and_says_so() -> None:
    """Down to half of it, so that the next turns find their beginning in the prefix cache."""
    talk = Talk(SamplingParams(8), max_seq_len=200)
    output = [talk(f"question {number} {'x' * 30}") for number in range(12)]
    dropped = [number for number, line in enumerate(output) if line]
    assert dropped
    assert "the context of 200 tokens is full; old turns dropped: " in output[dropped[0]]
    assert min(b - a for a, b in itertools.pairwise(dropped)) > 1
    assert talk.questions[-1].startswith("question 11")
    assert talk.prompts[-1].startswith(f"[user] {talk.questions[0]}")
    lengths = [len(talk.engine.encode(prompt)) for prompt in talk.prompts]
    assert max(lengths) <= 200 - 8


def test_a_question_that_never_fits_changes_nothing() -> None:
    talk = Talk(max_seq_len=99)
    talk("hello")
    before = list(talk.now.turns.messages)
    assert "this engine takes at most 98" in talk("y" * 300)
    assert (talk.now.turns.messages, talk.now.draft) == (before, "y" * 300)


def test_settings_are_those_of_requests() -> None:
    talk = Talk(SamplingParams(3, temperature=0.5, seed=7))
    assert talk("/set") == "max_tokens 3; temperature 0.5; seed 7"
    assert talk("/set temperature 0.6") == "temperature 0.6"
    talk('/set stop ["a", "b"]', "/set stop_token_ids [5]", "/set max_tokens 4")
    talk("/set ignore_eos true", "/set acceptance rejection", "/set seed null", "hello")
    [params] = talk.params
    assert params == SamplingParams(
        4, temperature=0.6, stop=["a", "b"], stop_token_ids=[5], ignore_eos=True,
        acceptance="rejection",
    )  # fmt: skip
    assert talk("/set temperature default", "/set seed default") == "temperature 0.5\nseed 7"
    assert talk("/set temprature 1").endswith("is no setting; did you mean temperature?")
    assert "temperature must be a number in 0..100, not 'hot'" in talk("/set temperature hot")
    assert "is no JSON object" in talk("/set logit_bias 5")
    assert talk('/set logit_bias {"5": -1}').startswith("error: logit_bias")  # of other engines
    assert "outside the vocabulary" in talk("/set stop_token_ids [9999]")
    assert talk("/set temperature") == "temperature 0.5"


def test_regenerate_answers_the_last_question_again() -> None:
    talk = Talk(SamplingParams(9, temperature=1.0))
    assert talk("/regenerate") == "error: there is no question yet"
    talk("one", "two")
    before = list(talk.now.turns.messages)
    assert talk("/regenerate") == ""
    assert talk.prompts[1] == talk.prompts[2]
    assert talk.now.turns.messages[:3] == before[:3]
    assert len(talk.now.turns.messages) == 4


def test_edit_takes_the_last_question_back() -> None:
    talk = Talk()
    output = talk("one", "two\nlines", "/edit", "/stats")
    assert "context: 0 of 4,000 tokens; turns: 1" in output
    assert (talk.now.draft, talk.questions) == ("two\nlines", ["one"])
    talk("/edit")
    assert (talk.now.draft, talk.questions) == ("one", [])
    assert talk("/edit") == "error: there is no question yet"
    talk.now.restore()
    assert talk.questions == ["one", "two\nlines"], "all that was taken goes back"
    assert "turns: 2" in talk("/stats")
    talk("/edit", "three")
    talk.now.restore()
    assert talk.questions == ["one", "three"], "a question was answered since"


def test_a_file_goes_before_the_next_question(tmp_path: Path) -> None:
    (tmp_path / "my notes.txt").write_text("größer\n/help\n", encoding="utf-8")
    talk = Talk()
    output = talk(f"/file {tmp_path}/my notes.txt")
    assert output == "my notes.txt: 13 characters, sent with the next question"
    talk("What is it?")
    whole = '<file name="my notes.txt">\ngrößer\n/help\n\n</file>\n\n'
    assert talk.questions == [f"{whole}What is it?"]
    talk("/edit")
    assert talk.now.draft == "What is it?"
    talk("And this?", "next")
    assert talk.questions == [f"{whole}And this?", "next"]
    (tmp_path / "image").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_text("z" * 100_000)
    for name, why in (("image", "not UTF-8"), ("none", "No such file"), ("long", "at most 3999")):
        assert why in talk(f"/file {tmp_path}/{name}")
    assert talk("/file") == "error: /file: give a file"


def test_a_saved_conversation_goes_on(tmp_path: Path) -> None:
    talk, path = Talk(system="Be brief."), tmp_path / "talk.json"
    talk("one", "two")
    assert talk(f"/save {path}") == f"saved in {path}; turns: 2"
    again = Talk()
    assert again(f"/load {path}") == f"loaded {path}; turns: 2"
    assert (again.now.system, again.now.turns.messages) == ("Be brief.", talk.now.turns.messages)
    again("three")
    assert talk("three") == ""
    assert again.prompts == talk.prompts[-1:]
    again("/save")  # where it was loaded
    assert len(json.loads(path.read_text())["messages"]) == 7
    assert "it exists; give a new file" in Talk()(f"/save {path}")
    assert "can't be written (No such file" in talk(f"/save {tmp_path}/none/x")
    assert [file.name for file in tmp_path.iterdir()] == ["talk.json"]
    assert Talk()("/save") == "error: /save: give a file"


def test_a_saved_conversation_is_a_line_of_an_input_file(tmp_path: Path) -> None:
    talk, path = Talk(), tmp_path / "talk.jsonl"
    talk("one", f"/save {path}")
    [request] = read_requests(path, talk.engine, SamplingParams())
    assert request.token_ids == talk.engine.chat_ids(talk.now.turns.messages)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("{}", "give one of prompt"), ('{"prompt": "a"}', "with messages"),
     ('{"messages": [{"content": "a"}]}', "role must be a text"), ("", "no requests"),
     ('{"messages": [{"role": "user", "content": "a"}]}\n' * 2, "one line with messages")],
)  # fmt: skip
def test_a_file_that_is_no_conversation(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text(text)
    talk = Talk()
    talk("hello")
    before = list(talk.now.turns.messages)
    output = talk(f"/load {tmp_path}/bad")
    assert output.startswith("error: ")
    assert message in output
    assert talk.now.turns.messages == before


def test_a_conversation_that_ends_with_a_question(tmp_path: Path) -> None:
    (tmp_path / "asked").write_text('{"messages": [{"role": "user", "content": "Well?"}]}')
    talk = Talk()
    talk(f"/load {tmp_path}/asked")
    assert (talk.now.draft, talk.questions) == ("Well?", [])
    assert "no such file" in talk(f"/load {tmp_path}/none")


@pytest.mark.parametrize(
    ("typed", "name"),
    [('"A B.json"', "A B.json"), ("'A B.json'", "A B.json"), (r"A\ B.json", "A B.json"),
     ("A B.json", "A B.json"), ("Tom's notes", "Tom's notes"), ('"Tom\'s notes"', "Tom's notes"),
     ('"~/A B.json"', "home/A B.json")],
)  # fmt: skip
def test_names_of_files_may_have_quotes(
    typed: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    talk = Talk()
    assert "turns: 1" in talk("one", f"/save {typed}")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert "turns: 1" in Talk()(f"/load {typed}")
    assert "sent with the next question" in talk(f"/file {typed}")
    for command in ("/save", "/load", "/file"):
        assert talk(f'{command} ""') == f"error: {command}: give a file"


def test_what_is_a_command() -> None:
    talk = Talk()
    listed = talk("/help")
    assert all(f"/{name}" in listed for name in COMMANDS)
    assert talk("/hlep") == "error: /hlep is no command; did you mean /help?; /help lists them"
    assert talk("/usr/lib is a folder", " /help?") == ""
    assert talk.questions == ["/usr/lib is a folder", " /help?"]


def test_a_new_conversation(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("notes")
    talk = Talk(system="be kind")
    talk("one", f"/save {tmp_path}/a", f"/file {tmp_path}/notes")
    assert talk("/clear", "two").startswith("a new conversation")
    assert talk.prompts[-1] == "[system] be kind\n[user] two\n"
    assert "give a file" in talk("/save")
    for command in ("/exit", "/bye"):
        with pytest.raises(EOFError):
            talk(command)


def test_stats() -> None:
    talk = Talk(limit=1 << 20)
    assert "context: 0 of 4,000 tokens; turns: 0" in talk("/stats")
    talk("hello", "more")
    context, last, total = talk("/stats").splitlines()
    used = len(talk.engine.encode(talk.prompts[-1], add_special_tokens=False)) + 3
    assert context == f"context: {used} of 4,000 tokens; turns: 2"
    assert last.startswith("last answer: 3 tokens (length), ")
    assert total.startswith("all answers: 6 tokens, acceptance length ")


def test_the_thought_of_the_last_answer() -> None:
    backend = backend_tokenizer()
    tokens = [*backend.encode("<think>def hello</think>return", add_special_tokens=False).ids, EOS]
    asked = backend.encode("<s>user: hi\nassistant: ", add_special_tokens=False).ids
    says = scripted(len(asked), tokens)
    talk = Talk(SamplingParams(99), tokenizer=fake_tokenizer(backend), next_token=says)
    assert talk("/thought") == "the last answer has no thought"
    assert talk("hi", "/thought") == "def hello"
    assert talk.now.turns.messages[-1]["content"] == "return"


def test_after_an_empty_answer_the_question_is_the_draft() -> None:
    talk = Talk(next_token=lambda history: EOS)
    assert talk("hello") == "error: the answer is empty (stop)"
    assert (talk.now.turns.messages, talk.now.draft) == ((), "hello")


def test_a_failed_answer_and_a_failed_engine() -> None:
    talk = Talk()
    talk.programs.fail = OSError("out of memory")
    assert "out of memory" in talk("hello")
    talk.programs.fail = None
    assert talk("hello") == ""
    talk.engine._loaded.driver._failure = "it is gone"
    with pytest.raises(EngineError, match="it is gone"):
        talk("more")
