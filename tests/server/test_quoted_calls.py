"""Calls with bare keys and strings between marks, and thoughts that a token and a word open."""

import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from mtpbuild.builder.checkpoint.generation import read_generation_ids
from mtpbuild.builder.models import find_family
from mtpbuild.runtime import Engine, RequestError, SamplingParams
from mtpbuild.runtime.constraints.grammar import GrammarTokens
from mtpbuild.runtime.contract.manifest import FileSpec
from mtpbuild.runtime.text.reasoning import opens_thought
from mtpbuild.runtime.text.tokenizer import Tokenizer, load_tokenizer
from mtpbuild.runtime.tool_calls.calls import ToolCallParser
from mtpbuild.runtime.tool_calls.detect import detect_form
from mtpbuild.runtime.tool_calls.forms import FORMS
from mtpbuild.runtime.tool_calls.grammar import write_calls_grammar
from mtpbuild.runtime.tool_calls.tool_use import read_tool_use
from tests.support.checkpoints import BASE
from tests.support.fakes import FakePrograms, fake_manifest, scripted, shared_tokenizer
from tests.support.model_tokenizers import gemma4, write_files
from tests.support.split_pieces import fed, joined

FORM, VOCABULARY = FORMS["gemma4"], 512
Q, CALL, END = '<|"|>', "<|tool_call>call:", "<tool_call|>"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("gemma4"), gemma4())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load(folder)


@cache
def load(folder: Path) -> Tokenizer:
    files = {path.name: FileSpec(size=0, sha256="") for path in folder.iterdir()}
    loaded = load_tokenizer(folder, fake_manifest().model_copy(update={"files": files}))
    assert loaded is not None
    return loaded


def read(text: str, parts: Sequence[str] = ()) -> Any:
    """Return a whole answer's content, its calls as they are written, and the text of a cut one."""
    parser = ToolCallParser(FORM)
    texts, calls = joined(fed(parser, [*(parts or [text])]))
    return texts["content"], calls, parser.cut


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"So.{CALL}get-it.now{{city:{Q}Ulm{Q},days:3}}{END}", "So.",
         [("get-it.now", '{"city":"Ulm","days":3}')]),
        (f"{CALL}f{{}}{END}{CALL}g{{a:-1.5e3,b:true,c:false,d:null}}{END}", "",
         [("f", "{}"), ("g", '{"a":-1.5e3,"b":true,"c":false,"d":null}')]),
        (f'{CALL}f{{a:{Q}{{"b": [1,\n2]}}, \\n\t:{Q}}}{END}', "",
         [("f", '{"a":"{\\"b\\": [1,\\n2]}, \\\\n\\t:"}')]),
        (f"{CALL}f{{a:{Q}{END}{CALL}g{{<|{Q}}}{END}", "",
         [("f", f'{{"a":"{END}{CALL}g{{<|"}}')]),
        (f"{CALL}f{{a:{{b:[{Q}{Q},[],{{c d:1}}],{Q}x:y{Q}:0}}}}{END}", "",
         [("f", '{"a":{"b":["",[],{"c d":1}],"x:y":0}}')]),
        (f"{CALL}f{{ a : 1 ,\n b: {Q}c{Q} }}{END}", "", [("f", '{ "a": 1,\n "b": "c" }')]),
        (f"{CALL}f{END}", "", [("f", "{}")]),
        (f"{CALL}f{{a:Ulm an der Donau,at:12:30,b:True,c:None}}{END}", "",
         [("f", '{"a":"Ulm an der Donau","at":"12:30","b":true,"c":null}')]),
        (f'{CALL}f{{"a":"x, y"}}{END}', "", [("f", '{"a":"x, y"}')]),
        (f"{CALL}f{{a:[1,2{END} so", " so", [("f", '{"a":[1,2]}')]),
        (f"{CALL}f{{a:1}}", "", [("f", '{"a":1}')]),
        (f"no {CALL}f {END}", f"no {CALL}f {END}", None),
        (f"<|tool_call>{Q}f{Q}{END}", f"<|tool_call>{Q}f{Q}{END}", []),
    ],
)  # fmt: skip
def test_calls(text: str, content: str, calls: Any) -> None:
    """Whole, in two pieces cut anywhere, and a character at a time."""
    whole = read(text)
    assert calls is None or whole == (content, calls, None)
    for at in range(1, len(text)):
        assert read(text, [text[:at], text[at:]]) == whole
    assert read(text, [*text]) == whole
    for _, arguments in whole[1]:
        json.loads(arguments)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [(f"{CALL}f{{a:{Q}rm -rf /tmp/", '{"a":"rm -rf /tmp/'), (f"{CALL}f{{a:{Q}x<|", '{"a":"x'),
     (f"{CALL}f{{a:[1,{{b:2}}", '{"a":[1,{"b":2}'),
     (f"{CALL}f{{a:tru", '{"a":'), (f"{CALL}f{{a", "{")],
)  # fmt: skip
def test_a_call_that_is_cut_is_not_completed(text: str, arguments: str) -> None:
    for parts in ([text], [*text]):
        assert read(text, parts) == ("", [("f", arguments)], text)
    said, calls, cut = read(f"So.{text}")
    assert (said, calls, cut) == ("So.", [("f", arguments)], "")


def test_arguments_come_as_they_are_written() -> None:
    calls = ToolCallParser(FORM)
    pieces = (f"{CALL}f{{te", f"xt:{Q}ab", "c <", f"{Q},n:1", f"2}}{END}")
    told = [[piece.text for piece in calls.feed(text)] for text in pieces]
    assert told == [["f", "{"], ['"text":"ab'], ["c "], ['<","n":'], ["12}"]]


KEYS = st.text("ab_-", min_size=1, max_size=3) | st.sampled_from(
    ["a b", "ключ", "x.y", ", :{", '"']
)
NASTY = st.text('<|">{},:[]\\\n', max_size=6).filter(lambda text: Q not in text)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5) | NASTY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(arguments=st.dictionaries(KEYS, VALUES, max_size=3), data=st.data())
def test_values_come_back(
    arguments: dict[str, Any], data: st.DataObject, tokenizer: Tokenizer
) -> None:
    """From JSON to the notation and back; the grammar accepts all that the template writes."""
    text = rendered(tokenizer, arguments)
    content, ((name, written),), cut = read(text)
    assert (content, name, json.loads(written), cut) == ("", "f", arguments, None)
    at = data.draw(st.integers(0, len(text)))
    assert read(text, [text[:at], text[at:]])[1] == [(name, written)]
    assert accepts(tokenizer, {"f": True}, text)


def rendered(tokenizer: Tokenizer, arguments: dict[str, Any]) -> str:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: Any = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = tokenizer.chat_prompt(messages, add_generation_prompt=False)
    return text.partition("<|turn>model\n")[2].removesuffix("<turn|>\n")


@cache
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    tokens: Any = GrammarTokens(tokenizer, VOCABULARY, [1])
    return LLTokenizer(tokens, eos_token=[1])


def matcher(tokenizer: Tokenizer, tools: dict[str, Any], *, single: bool = False) -> LLMatcher:
    grammar = write_calls_grammar(FORM, tools, tokenizer, single=single)
    made = LLMatcher(vocabulary(tokenizer), grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(tokenizer: Tokenizer, tools: dict[str, Any], text: str | list[int]) -> bool:
    """Tell whether the grammar of forced calls takes this answer, and lets it end."""
    ids = tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
    follows = matcher(tokenizer, tools)
    return follows.try_consume_tokens(ids) == len(ids) and follows.is_accepting()


CITY: Any = {
    "type": "object",
    "properties": {
        "near": {"type": "boolean", "description": "whether"},
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "unit": {"enum": ["C", 'a "<|turn>"', 7, None, {"a": [True]}]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9},
                 "minItems": 1, "maxItems": 2},
        "to:place": {"anyOf": [{"type": "number", "maximum": 3}, {"type": "null"}]},
        "more": {"$ref": "#/$defs/Node"},
        "on": {"type": ["string", "null"], "format": "date", "maxLength": 3},
        "any": {"allOf": [{"type": "object", "additionalProperties": {"type": "boolean"}}]},
    },
    "required": ["city", "days"],
    "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
}  # fmt: skip
TOOLS = {"get-city": CITY, "now": None}
GOOD = f"{CALL}get-city{{city:{Q}Ulm{Q},days:[1]}}{END}"


@pytest.mark.parametrize(
    "call",
    [GOOD, f"{CALL}now{{}}{END}", f"{GOOD}{CALL}now{{}}{END}{GOOD}",
     GOOD.replace("city:", "near:true,city:"), GOOD.replace("Ulm", ",}\n: "),
     GOOD.replace(",days", f",unit:{Q}C{Q},days"), GOOD.replace("[1]", f"[0,9],{Q}to:place{Q}:2.5"),
     GOOD.replace(",days", ",unit:{a:[true]},days"), GOOD.replace(",days", ",unit:7,days"),
     GOOD.replace("[1]", "[1],more:{next:{next:{}}}"), GOOD.replace("[1]", "[1],on:null"),
     GOOD.replace("[1]", f"[1],on:{Q}x{Q},any:{{a.b:true,{Q}c d{Q}:false}}")],
)  # fmt: skip
def test_the_grammar_accepts_calls(call: str, tokenizer: Tokenizer) -> None:
    assert accepts(tokenizer, TOOLS, call)
    content, calls, cut = read(call)
    assert (content, cut) == ("", None)
    assert all(name == "now" or fits(arguments) for name, arguments in calls)


@pytest.mark.parametrize(
    "call",
    ["", "Hello", GOOD.removesuffix(END), GOOD.replace("}", ""), f"{CALL}other{{}}{END}",
     f"{CALL}now{{a:1}}{END}", GOOD.replace(Q, '"'), GOOD.replace("[1]", "[]"), GOOD + "so",
     GOOD.replace("[1]", "[1,2,3]"), GOOD.replace("[1]", f"[{Q}1{Q}]"), GOOD.replace("[1]", "[10]"),
     GOOD.replace("Ulm", ""), GOOD.replace("Ulm", "1234567"), GOOD.replace(",days:[1]", ""),
     GOOD.replace("city:", "city :"), GOOD.replace("city:", f"{Q}city{Q}:"),
     GOOD.replace("}", ",}"),
     GOOD.replace(",days", f",unit:{Q}F{Q},days"), GOOD.replace("[1]", "[1],near:true"),
     GOOD.replace("[1]", "[1],to:place:1"), GOOD.replace("[1]", "[1],other:1"),
     GOOD.replace("[1]", "[1],any:{a:1}"), GOOD.replace("<|tool_call>", "")],
)  # fmt: skip
def test_the_grammar_refuses_what_is_no_such_call(call: str, tokenizer: Tokenizer) -> None:
    assert not accepts(tokenizer, TOOLS, call)


def test_marks_are_their_tokens(tokenizer: Tokenizer) -> None:
    """The same text of ordinary tokens is no mark, and in no string, as it would end there."""
    ids = tokenizer.encode(GOOD, add_special_tokens=False)
    (mark, *_) = tokenizer.encode(Q, add_special_tokens=False)
    at = ids.index(mark)
    ordinary = tokenizer.spell(Q)
    assert mark not in ordinary
    assert tokenizer.text(ordinary) == Q
    assert not accepts(tokenizer, TOOLS, [*ids[:at], *ordinary, *ids[at + 1 :]])
    free = {"now": {"type": "object", "properties": {"a": {"type": "string"}}}}
    ids = tokenizer.encode(f"{CALL}now{{a:{Q}x{Q}}}{END}", add_special_tokens=False)
    at = ids.index(mark) + 1
    assert accepts(tokenizer, free, ids)
    assert accepts(tokenizer, free, [*ids[:at], *tokenizer.spell("<|turn><|"), *ids[at:]])
    assert not accepts(tokenizer, free, [*ids[:at], *ordinary, *ids[at:]])
    unit = tokenizer.spell('a "<|turn>"')
    before, after = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in (f"{CALL}get-city{{city:{Q}Ulm{Q},unit:{Q}", f"{Q},days:[1]}}{END}")
    )
    assert accepts(tokenizer, TOOLS, [*before, *unit, *after])
    turn = tokenizer.encode('a "<|turn>"', add_special_tokens=False)
    assert not accepts(tokenizer, TOOLS, [*before, *turn, *after])


def test_marks_that_are_no_tokens() -> None:
    """A tokenizer without them spells them, and a string ends at the first one."""
    assert accepts(shared_tokenizer(), TOOLS, f"{GOOD}{CALL}now{{}}{END}")
    assert accepts(shared_tokenizer(), TOOLS, GOOD.replace("Ulm", '<|"|x'))
    assert not accepts(shared_tokenizer(), TOOLS, GOOD.replace("Ulm", f"Ulm{Q}"))
    assert not accepts(shared_tokenizer(), TOOLS, GOOD.replace(Q, '"'))


def fits(arguments: str) -> bool:
    return jsonschema_rs.is_valid(CITY, json.loads(arguments))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_grammar_allows_is_read_and_fits(seed: int, tokenizer: Tokenizer) -> None:
    rng, follows = np.random.default_rng(seed), matcher(tokenizer, TOOLS, single=True)
    ids, mask = list[int](), np.zeros((1, VOCABULARY // 32), np.int32)
    while not follows.is_stopped() and len(ids) < 2000:
        fill_next_token_bitmask(follows, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ids.append(int(rng.choice(allowed)))
        assert follows.consume_token(ids[-1])
    shown = [*tokenizer.special_ids.values()]
    content, ((name, arguments),), cut = read(tokenizer.text(ids, shown))
    assert (content, cut) == ("", None)
    assert arguments == "{}" if name == "now" else fits(arguments)


@pytest.mark.parametrize(
    ("part", "says"),
    [({"type": "string", "pattern": "a"}, "pattern in a schema"),
     ({"enum": [f"a{Q}"]}, "a text with"), ({"properties": []}, r"properties \[\]"),
     ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "allOf in a schema"),
     ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf in a schema"),
     ({"type": "array", "prefixItems": [{}]}, "prefixItems in a schema"),
     ({"type": "object", "required": [[]]}, r"required \[\[\]\]"), ({"enum": []}, "enum in a"),
     ({"$ref": "#/$defs/None"}, "the schema null"), (False, "the schema false"),
     ({"type": "string", "maxLength": "3"}, 'maxLength "3"')],
)  # fmt: skip
def test_schemas_that_calls_can_not_be_held_to(part: Any, says: str, tokenizer: Tokenizer) -> None:
    parameters = {"type": "object", "properties": {"a": part}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert read_tool_use(tokenizer, tools=[tool]) is not None
    with pytest.raises(RequestError, match=f"in this model's form a call can't be held to {says}"):
        read_tool_use(tokenizer, tools=[tool], tool_choice="required")


def test_the_ends_are_those_of_generation_config(folder: Path) -> None:
    ids = load(folder).special_ids
    ends = [1, ids["<turn|>"], ids["<|tool_response>"]]
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"bos_token_id": 2, "eos_token_id": ends}))
    config = find_family(BASE).config.parse(BASE | {"vocab_size": VOCABULARY})
    read_ids = read_generation_ids(folder, config)
    path.unlink()
    assert read_ids.eos_token_ids == tuple(ends)
    assert read_ids.thinking_token_ids == (ids["<|channel>"], ids["<channel|>"])


def engine_saying(tokenizer: Tokenizer, text: str, **options: Any) -> Engine:
    """Return an engine whose answer to HI is this text."""
    ids = tokenizer.special_ids
    ends = (1, ids["<turn|>"], ids["<|tool_response>"])
    sizes: Any = {"max_seq_len": 500, "vocab_size": VOCABULARY, "prefill_chunk": 64}
    manifest = fake_manifest(**sizes, eos=ends)
    thinking = {"thinking_token_ids": (ids["<|channel>"], ids["<channel|>"])}
    model = manifest.model.model_copy(update=thinking)
    manifest = manifest.model_copy(update={"model": model})
    prompt = tokenizer.encode(tokenizer.chat_prompt(HI, **options), add_special_tokens=False)
    answer = tokenizer.encode(text, add_special_tokens=False)
    programs = FakePrograms(manifest, next_token=scripted(len(prompt), answer))
    return Engine(programs, manifest, tokenizer)


WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SAID = f"<|channel>thought\nI ask.\n<channel|>I look.{CALL}weather{{city:{Q}Ulm{Q}}}{END}"


@pytest.mark.parametrize("end", ["<turn|>", "<|tool_response>", "<eos>"])
def test_an_answer_with_thought_text_and_call(end: str, tokenizer: Tokenizer) -> None:
    options: Any = {"tools": WEATHER, "chat_template_kwargs": {"enable_thinking": True}}
    with engine_saying(tokenizer, SAID + end + "more", **options) as engine:
        whole = engine.chat(HI, SamplingParams(max_tokens=200), **options)
        with engine.chat(HI, SamplingParams(max_tokens=200), stream=True, **options) as stream:
            chunks = [*stream]
            streamed = stream.result()
    for answer in (whole, streamed):
        assert (answer.reasoning_content, answer.content) == ("I ask.\n", "I look.")
        (call,) = answer.tool_calls
        assert call["function"] == {"name": "weather", "arguments": '{"city":"Ulm"}'}
        assert (answer.finish_reason, answer.text) == ("tool_calls", SAID)
    assert "".join(chunk.reasoning_content for chunk in chunks) == "I ask.\n"
    pieces = [call["function"]["arguments"] for chunk in chunks for call in chunk.tool_calls]
    assert "".join(pieces) == '{"city":"Ulm"}'
    assert len(pieces) > 3


def test_a_thought_that_is_not_split_keeps_its_marks(tokenizer: Tokenizer) -> None:
    with engine_saying(tokenizer, SAID + "<turn|>") as engine:
        params = engine.answer_params(SamplingParams(max_tokens=200), split_thought=False)
        answer = engine.generate(engine.chat_ids(HI), params)
    assert answer.text.startswith("<|channel>thought\nI ask.\n<channel|>I look.")


def test_a_call_that_max_tokens_cuts(tokenizer: Tokenizer) -> None:
    raw = f"{CALL}weather{{city:{Q}Ul"
    count = len(tokenizer.encode(raw, add_special_tokens=False))
    with engine_saying(tokenizer, f"{raw}m{Q}}}{END}<turn|>", tools=WEATHER) as engine:
        answer = engine.chat(HI, SamplingParams(max_tokens=count), tools=WEATHER)
    assert (answer.content, answer.tool_calls, answer.finish_reason) == (raw, [], "length")


def test_thinking_is_switched_on_in_the_system_turn(tokenizer: Tokenizer) -> None:
    """And where it is off, the template writes an empty thought."""
    on = tokenizer.chat_prompt(HI, chat_template_kwargs={"enable_thinking": True})
    off = tokenizer.chat_prompt(HI)
    assert on.startswith("<bos><|turn>system\n<|think|>")
    assert on.endswith("<|turn>model\n")
    assert off.endswith("<|turn>model\n<|channel>thought\n<channel|>")
    assert tokenizer.chat_template is not None
    assert detect_form(tokenizer.chat_template) == "gemma4"


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "hi",
        "<|channel>thought\n",
        "<|turn>model\n<|channel>thought\n",
        "a<channel|><|channel>",
        "<bos>",
    ],
)
def test_what_a_user_spells_opens_nothing(text: str, thinks: bool, tokenizer: Tokenizer) -> None:
    """No thought, and one BOS begins the prompt, however it is encoded."""
    ids = tokenizer.special_ids
    marks = (ids["<|channel>"], ids["<channel|>"])
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.chat_prompt(messages, chat_template_kwargs={"enable_thinking": thinks})
    tokens = tokenizer.encode(prompt)
    assert tokens == tokenizer.encode(prompt, add_special_tokens=False)
    assert tokens.count(2) == 1 + (text == "<bos>")
    assert tokens[:2].count(2) == 1
    assert not opens_thought(tokens, marks, tokenizer)
    opened = tokenizer.encode(f"{prompt}<|channel>thought\nI", add_special_tokens=False)
    assert opens_thought(opened, marks, tokenizer) is thinks


def test_a_turn_goes_on_after_a_tool(tokenizer: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": [1, "x"]}}}
    asks = {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [call]}
    prompt = tokenizer.chat_prompt([*HI, asks, {"role": "tool", "name": "f", "content": "5"}])
    assert prompt == (
        "<bos><|turn>user\nhi<turn|>\n<|turn>model\n<|channel>thought\nI ask.<channel|>"
        f"{CALL}f{{a:[1,{Q}x{Q}]}}{END}<|tool_response>response:f{{value:{Q}5{Q}}}<tool_response|>"
    )


def test_every_pair_of_calls_is_read(tokenizer: Tokenizer) -> None:
    drawn: list[dict[str, Any]] = [{}, {"a": ""}, {"b": [None, {"c": "<|"}]}]
    for one, other in itertools.product(drawn, drawn):
        text = "".join(rendered(tokenizer, arguments) for arguments in (one, other))
        assert [json.loads(arguments) for _, arguments in read(text)[1]] == [one, other]
