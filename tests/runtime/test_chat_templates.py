"""Prompts, token ids and texts equal transformers': its tokenizers and templates are the oracle."""

import enum
import json
import random
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from mtpbuild.runtime import RequestError, SamplingParams, Tokenizer
from mtpbuild.runtime.contract.manifest import FileSpec
from mtpbuild.runtime.errors import EngineFileError
from mtpbuild.runtime.text.chat_template import ChatTemplates, TemplateText
from mtpbuild.runtime.text.detokenizer import Span, TextStream
from mtpbuild.runtime.text.tokenizer import load_tokenizer
from tests.support.fakes import fake_engine, fake_manifest, scripted
from tests.support.model_tokenizers import (
    FAMILIES,
    TEMPLATES,
    Files,
    folder_of,
    plain,
    special,
    train,
    write_files,
)

Messages = list[dict[str, Any]]

CITIES = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "integer"}},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
WEATHER["function"] |= {"description": "Погода <сейчас> & today", "parameters": CITIES}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": None}}


def call(id: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


HELLO: Messages = [{"role": "user", "content": "Hello <|role_sep|>\n 你好 🦊"}]
LONG: Messages = [
    {"role": "system", "content": "Be brief. " * 40},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>\nsum\n</think>\n\n2"},
    {"role": "user", "content": "And é\u0301?"},
]
CALLS: Messages = [
    {"role": "user", "content": "Weather in Köln?"},
    {"role": "assistant", "content": None, "reasoning": "ask"}
    | {"tool_calls": [call("a", city="Köln")]},
    {"role": "tool", "tool_call_id": "a", "name": "weather", "content": '{"t": 20}'},
]  # fmt: skip
TWO_CALLS: Messages = [
    *CALLS[:1],
    {"role": "assistant", "content": "Two.", "reasoning_content": "both"}
    | {"tool_calls": [call("a", city="Köln", days=[1, 2]), call("b", city="Ulm")]},
    CALLS[2],
    CALLS[2] | {"tool_call_id": "b"},
]
CHATS = {"hello": HELLO, "long": LONG, "calls": CALLS, "two calls": TWO_CALLS}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [WEATHER, CLOCK]},
    "no tools": {"tools": []},
    "documents": {"documents": [{"title": "t", "text": "Ж <b>"}]},
    "no thinking": {"chat_template_kwargs": {"enable_thinking": False, "thinking": True}},
    "own names": {"chat_template_kwargs": {"bos_token": "<other>", "limit": 2}},
    "no generation": {"add_generation_prompt": False},
}

TEXTS = [
    "plain words, don't you'd 12345678", "  leading \n\n\n and   trailing \t\r\n ",
    "🦊👩‍👩‍👧 你好，世界 ｜ ▁ Ġ é ñ ÿ \u00ad", unicodedata.normalize("NFD", "größer é Å Привет й"),
    "Å ﬁ ① \u1e9b\u0323 \ufeff \u200d \x00 \x7f",
    "a<|role_sep|>\nb<|message_sep|>\n\nc<|role_sep|> d<|im_end|>e</s>",
    "<think>x</think><tool_call>{}</tool_call> <s> <s>",
    "<｜User｜>q<｜Assistant｜><think>\n<｜tool▁call▁begin｜>",
    "[gMASK]<sop><|user|>\nx<|observation|><|endoftext|>", "",
]  # fmt: skip


@dataclass
class Pair:
    """The same files, loaded by both."""

    theirs: Any
    ours: Tokenizer


def load_ours(folder: Path) -> Tokenizer:
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    spec = FileSpec(size=0, sha256="")
    manifest = fake_manifest().model_copy(update={"files": dict.fromkeys(files, spec)})
    loaded = load_tokenizer(folder, manifest)
    assert loaded is not None
    return loaded


def load(folder: Path, files: Files) -> Pair:
    from transformers import AutoTokenizer

    write_files(folder, files)
    return Pair(AutoTokenizer.from_pretrained(folder), load_ours(folder))


@cache
def made(family: str) -> Files:
    return FAMILIES[family]()


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load(tmp_path_factory.mktemp(request.param), made(request.param))


def rendered(
    theirs: Any, messages: Messages, *, tokenize: bool = False, **options: Any
) -> str | list[int]:
    """Return what transformers makes of it, in the words of our options."""
    options = {"add_generation_prompt": True} | options
    own = options.pop("chat_template_kwargs", {})
    found = theirs.apply_chat_template(messages, tokenize=tokenize, **options, **own)
    return found["input_ids"] if tokenize else found


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chat", CHATS)
def test_prompts_and_their_ids(pair: Pair, chat: str, options: str) -> None:
    from jinja2 import TemplateError

    messages, asked = CHATS[chat], OPTIONS[options]
    try:
        wanted = rendered(pair.theirs, messages, **asked)
    except TemplateError as refused:
        with pytest.raises(RequestError, match=f"refuses these messages: {refused}"):
            pair.ours.chat_prompt(messages, **asked)
        return
    prompt = pair.ours.chat_prompt(messages, **asked)
    assert prompt == wanted
    ids = pair.ours.encode(prompt, add_special_tokens=False)
    assert ids == rendered(pair.theirs, messages, tokenize=True, **asked)


@pytest.mark.parametrize(
    "final", ["Two and", "  trailing  ", [{"type": "text", "text": "Two and"}]]
)
def test_a_final_message_is_continued(pair: Pair, final: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": final}]
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    try:
        wanted = rendered(pair.theirs, messages, **asked)
    except Exception:  # a template that knows no parts
        with pytest.raises(RequestError):
            pair.ours.chat_prompt(messages, continue_final_message=True)
        return
    assert pair.ours.chat_prompt(messages, continue_final_message=True) == wanted


@pytest.mark.parametrize("text", TEXTS)
def test_texts(pair: Pair, text: str) -> None:
    """Ids with and without special tokens, and the text that comes back token by token."""
    bare = pair.theirs(text, add_special_tokens=False).input_ids
    assert pair.ours.encode(text, add_special_tokens=False) == bare
    wanted = pair.theirs(text).input_ids
    bos = pair.theirs.bos_token_id
    config = json.loads((Path(pair.theirs.name_or_path) / "tokenizer_config.json").read_text())
    if config.get("add_bos_token") and wanted[:1] != [bos]:
        wanted = [bos, *wanted]  # transformers 5 doesn't look at it where there is a tokenizer.json
    assert pair.ours.encode(text) == wanted
    assert streamed(pair.ours, bare) == decoded(pair.theirs, bare)


def test_any_tokens_give_transformers_text(pair: Pair) -> None:
    """Halves of characters, special tokens and ids that stand for nothing among them.

    SentencePiece's bytes are not: one that is wrong spoils its neighbours for transformers alone.
    """
    rng, vocabulary = random.Random(0), pair.theirs.get_vocab()
    spoiling = {id for token, id in vocabulary.items() if token.startswith("<0x")}
    known = [id for id in range(len(pair.theirs) + 3) if id not in spoiling]
    for length in (1, 2, 5, 30) * 25:
        ids = rng.choices(known, k=length)
        assert streamed(pair.ours, ids) == decoded(pair.theirs, ids)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream, spans = TextStream(tokenizer, ()), list[Span]()
    for id in ids:
        stream.push(id, False)
        spans += stream.take()
    return "".join(span.text for span in (*spans, *stream.take(everything=True)))


def decoded(theirs: Any, ids: list[int]) -> str:
    return theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_templates_use_the_tokens(pair: Pair) -> None:
    """Markers are single tokens in both, so that the comparisons above compare something."""
    ids = pair.ours.encode(pair.ours.chat_prompt(CALLS, tools=[WEATHER]), add_special_tokens=False)
    specials = [name for id in ids if (name := pair.ours.find_special_name(id))]
    added = set(pair.theirs.get_added_vocab().values())
    assert len(added.intersection(ids)) >= 3
    assert specials


def test_a_bos_is_not_added_twice(tmp_path: Path) -> None:
    pair = load(tmp_path, made("gigachat"))
    prompt = pair.ours.chat_prompt(HELLO)
    ids = rendered(pair.theirs, HELLO, tokenize=True)
    assert prompt.startswith("<s>")
    assert list(ids).count(1) == 1
    assert pair.ours.encode(prompt) == pair.ours.encode(prompt, add_special_tokens=False) == ids
    assert pair.theirs(prompt).input_ids == [1, *ids]  # what the template's own flag is for


def features(**config: Any) -> Files:
    """Return a tokenizer without a family, and the template that shows what templates are given."""
    added = [*special("<|role|>\n"), *plain("<image>", "<think>", "<user>")]
    backend = train([], added, first=["<s>", "</s>"])
    return folder_of(backend, {"tokenizer_class": "PreTrainedTokenizerFast"} | config)


def all_features() -> str:
    return (TEMPLATES / "all_features.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "config",
    [{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": None},
     {"eos_token": "<user>", "image_token": "<image>", "role": "x"},
     {"eos_token": "</s>", "extra_special_tokens": {"role_token": "<|role|>\n"}}, {}],
)  # fmt: skip
def test_all_features(tmp_path: Path, config: dict[str, Any]) -> None:
    files = features(**config, add_bos_token=True)
    pair = load(tmp_path, files | {"chat_template.jinja": all_features()})
    messages = [*TWO_CALLS, {"role": "user", "content": [{"type": "text", "text": "é"}]}]
    for name, asked in OPTIONS.items():
        wanted = rendered(pair.theirs, messages, **asked)
        assert pair.ours.chat_prompt(messages, **asked) == wanted, name


@pytest.mark.parametrize(
    "config",
    [{"eos_token": "<user>", "additional_special_tokens": ["<think>", "<new>"]},
     {"eos_token": "</s>", "pad_token": "<pad>", "think_token": "<think>"},
     {"added_tokens_decoder": {}, "eos_token": {"__type": "AddedToken", "content": "</s>"}},
     {"split_special_tokens": True}],
)  # fmt: skip
def test_the_configuration_has_a_word_about_tokens(tmp_path: Path, config: dict[str, Any]) -> None:
    pair = load(tmp_path, features(**config))
    text = "a<s>b</s><think> <user>c<|role|>\nd<new>e<pad><image>"
    ids = pair.ours.encode(text)
    assert ids == pair.theirs(text).input_ids
    assert streamed(pair.ours, ids) == decoded(pair.theirs, ids)


def test_the_configuration_changes_flags(tmp_path: Path) -> None:
    files = features()
    backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    names = ("single_word", "normalized", "special", "lstrip", "rstrip")
    off = dict.fromkeys(names, False)
    tokens = {"<think>": {"special": True, "lstrip": True, "rstrip": True}, "<|role|>\n": {}}
    decoder = {
        str(backend.token_to_id(name)): {"content": name, **off, **own}
        for name, own in tokens.items()
    }
    decoder["999"] = {"content": "<new>", **off}
    pair = load(tmp_path, features(added_tokens_decoder=decoder, eos_token="</s>"))
    ids = pair.ours.encode("a  <think>  b<|role|>\n<new> <user>")
    assert ids == pair.theirs("a  <think>  b<|role|>\n<new> <user>").input_ids
    assert streamed(pair.ours, ids) == decoded(pair.theirs, ids) == "ab<new> <user>"


def test_what_training_left_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(features()["tokenizer.json"])
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    pair = load(tmp_path, folder_of(backend, {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert pair.ours.encode("Hello, hello") == pair.theirs("Hello, hello").input_ids


def test_an_added_token_is_plain_text(tmp_path: Path) -> None:
    """This holds of letters that bytes are spelled with too, which transformers takes for bytes."""
    backend = tokenizers.Tokenizer.from_str(features()["tokenizer.json"])
    backend.add_tokens(plain("<né>", "Ġx", "<｜ж｜>", "a b\n"))
    pair = load(tmp_path, folder_of(backend, {"tokenizer_class": "PreTrainedTokenizerFast"}))
    text = "<né>Ġx<｜ж｜>a b\n"
    ids = pair.ours.encode(text)
    assert len(ids) == 4
    assert streamed(pair.ours, ids) == text
    assert decoded(pair.theirs, ids) == "<n\ufffd> x<｜ж｜>a b\n"


def source(name: str) -> str:
    return f"{name}: {{{{ messages | length }}}}"


FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ("in the configuration", {}),
        ([{"name": n, "template": source(n)} for n in ("default", "tool_use")], {}),
        ([{"name": n, "template": source(n)} for n in ("default", "rag")], {}),
        ("in the configuration", {FILE: source("file")}),
        (None, {FILE: source("file"), f"{FOLDER}/tool_use.jinja": source("folder")}),
        ("in the configuration", {f"{FOLDER}/default.jinja": source("folder")}),
    ],
)
def test_which_template(tmp_path: Path, config: Any, files: Files) -> None:
    pair = load(tmp_path, features(chat_template=config) | files)
    for tools in (None, [], [WEATHER]):
        wanted = rendered(pair.theirs, HELLO, tools=tools)
        assert pair.ours.chat_prompt(HELLO, tools=tools) == wanted


def test_templates_without_a_default(tmp_path: Path) -> None:
    ours = load_ours(write_files(tmp_path, features() | {f"{FOLDER}/rag.jinja": source("rag")}))
    with pytest.raises(RequestError, match=r"chat templates \(rag\) have no default"):
        ours.chat_prompt(HELLO)


def one(text: str) -> ChatTemplates:
    return ChatTemplates(
        {"default": TemplateText("chat_template.jinja", text)}, {"bos_token": "<s>"}
    )


class Role(enum.StrEnum):
    USER = "user"


def test_rich_values_are_made_plain() -> None:
    messages = [{"role": Role.USER, "content": ("hi", {"n": True})}]
    shown = one("{{ messages | tojson }}").render(messages)
    assert json.loads(shown) == [{"role": "user", "content": ["hi", {"n": True}]}]
    assert messages[0]["role"] is Role.USER, "the caller's own are left alone"


deep: Any = []
for _ in range(2000):
    deep = [deep]


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        ("{{ raise_exception('no\nsuch role') }}", {}, "refuses these messages: no\nsuch role"),
        ("{{ messages[0].content + 5 }}", {}, "refuses these messages: can only concatenate"),
        ("{{ messages[0].content.__class__.mro() }}", {}, "refuses these messages: .*unsafe"),
        ("{% set ns = namespace(_x=1) %}", {}, "refuses these messages: .*_x"),
        ("{% set ns = namespace() %}{% set ns.__y = 1 %}", {}, "refuses these messages: .*__y"),
        ("{{ dict.mro() }}", {}, "refuses these messages"),
        ("{{ messages.append(1) }}", {}, "refuses these messages"),
        ("", {"tools": [5]}, "tools 0 is not a JSON object: 5"),
        ("", {"tools": {"a": 1}}, "tools is a list of JSON objects"),
        ("", {"tools": [{"a": object}]}, "tools 0 has a value that is not JSON"),
        ("", {"documents": "x"}, "documents is a list of JSON objects"),
        ("", {"chat_template_kwargs": 5}, "chat_template_kwargs is an object such as"),
        ("", {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs can't have tools"),
        ("", {"chat_template_kwargs": {"chat_template": "x"}}, "an engine has its own template"),
        ("", {"chat_template_kwargs": {5: "x"}}, "names must be texts"),
        ("", {"chat_template_kwargs": {"a": deep}}, "nested too deeply"),
        (
            "{{ messages }}",
            {"continue_final_message": True, "add_generation_prompt": True},
            "give one of add_generation_prompt and continue_final_message",
        ),
        ("{{ messages }}", {"continue_final_message": True}, "the chat template reads no content"),
        ("content", {"continue_final_message": True}, "leaves the final message out"),
        ("content", {"continue_final_message": "thinking"}, "the final message has no thinking"),
        ("n {{ 1 }}", {"continue_final_message": "n"}, "the final message's n has no text"),
    ],
)
def test_refusals(template: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        one(template).render([{"role": "user", "content": "hi", "n": 5}], **options)


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, ["hi"], [[]], None])
def test_what_is_not_a_conversation(messages: Any) -> None:
    with pytest.raises(RequestError) as refused:
        one("{{ messages }}").render(messages)
    assert refused.value.setting == "messages"


@pytest.mark.parametrize("config", [{"chat_template": [{"name": "x"}]}, {"chat_template": [5]}])
def test_templates_that_can_not_be(tmp_path: Path, config: dict[str, Any]) -> None:
    write_files(tmp_path, features(**config))
    with pytest.raises(EngineFileError, match="a chat_template without name or template"):
        load_ours(tmp_path)


@pytest.mark.parametrize("token", [5, {}, {"content": 5}])
def test_tokens_that_can_not_be(tmp_path: Path, token: Any) -> None:
    write_files(tmp_path, features(added_tokens_decoder={"7": token}))
    with pytest.raises(EngineFileError, match="added_tokens_decoder 7 is not a token"):
        load_ours(tmp_path)


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("end", [151, 152, 153])
def test_generation_ends_at_each_end(end: int, wrong: bool) -> None:
    """GLM has three; the end may be an accepted draft in the middle of a window."""
    says = scripted(1, [20, 21, end, 22, 23])
    engine, _ = fake_engine(
        eos=(151, 152, 153), next_token=says, draft_is_right=lambda position: not wrong
    )
    with engine:
        result = engine.generate([5], SamplingParams(max_tokens=9))
    assert (result.token_ids, result.finish_reason) == ([20, 21, end], "stop")
