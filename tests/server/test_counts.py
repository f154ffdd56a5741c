"""What an answer says of its tokens: their number, their places in the text, the likeliest."""

from typing import Any

import pytest

from mtpbuild.runtime import SamplingParams
from mtpbuild.runtime.requests.request import Chunk, TokenLogprobs
from mtpbuild.runtime.server.answers import AnswerChoice
from mtpbuild.runtime.server.chat import ChatAnswer
from mtpbuild.runtime.server.completions import CompletionAnswer
from mtpbuild.runtime.server.protocol import ChatBody, CompletionBody
from mtpbuild.runtime.text.detokenizer import Span
from tests.support.fakes import fake_engine, fake_tokenizer, scripted
from tests.support.served import ASK, HELLO, chat, events, metrics, saying, served

SAID = "<think>\nI think it.</think>\n\nIt is 5 größer 🙂.｜end｜"
THOUGHT = "<think>\nI think it.</think>"
TEXT, CHAT = CompletionBody(prompt="", logprobs=0), ChatBody(messages=[], logprobs=True)


def thought_tokens() -> int:
    return len(fake_tokenizer().encode(THOUGHT, add_special_tokens=False))


@pytest.mark.parametrize("nextn", [0, 1, 3])
@pytest.mark.parametrize("stop", [[], ["</think>\n\nIt is 6"], ["it.</think>\n\nQ", "\nQ"]])
def test_the_tokens_of_a_thought(nextn: int, stop: list[str]) -> None:
    """They are counted token by token, however many come at once and whatever is held back."""
    tokens = fake_tokenizer().encode(SAID, add_special_tokens=False)
    engine, _ = fake_engine(nextn=nextn, max_seq_len=300, next_token=scripted(1, tokens))
    params = SamplingParams(max_tokens=len(tokens), stop=stop, split_thought=True)
    with engine:
        chunks = [*engine.stream([5], params)]
        counts = [chunk.reasoning_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == thought_tokens()
        early = [*engine.stream([5], SamplingParams(max_tokens=4, split_thought=True))]
        assert early[-1].reasoning_tokens == 4


def test_stop_strings_are_for_the_answer() -> None:
    body = HELLO | {"max_tokens": 100}
    with served(**saying(SAID)) as (server, _), server.client() as client:

        def ask(**more: Any) -> tuple[Any, Any, Any]:
            choice = chat(client, body | more)
            message = choice["message"]
            return message.get("reasoning"), message["content"], choice["stop_reason"]

        assert ask(stop=["think", " is"]) == ("\nI think it.", "\n\nIt", " is")
        assert ask(stop=["I thi", " is"], stop_in_thought=True) == ("\n", None, "I thi")
        assert ask(stop="</think>\n\nIt is", max_tokens=30)[2] is None
    with served(**saying(SAID.removeprefix(THOUGHT))) as (server, _), server.client() as client:
        choice = chat(client, body | {"stop": "\n\n"})
        assert (choice["message"]["content"], choice["stop_reason"]) == (None, "\n\n")


def test_generated_tokens_are_those_that_somebody_got() -> None:
    with served() as (server, _), server.client() as client:
        used = 0
        for count in (2, 3, 6, 7):
            told = client.post("/v1/completions", json=ASK | {"max_tokens": count}).json()
            used += told["usage"]["completion_tokens"]
            steps = told["metrics"]["speculative_decoding"]
            assert steps["mean_acceptance_length"] == count / steps["num_spec_steps"]
        found = metrics(client)
    for name in ("generation_tokens_total", "request_generation_tokens_sum"):
        assert float(found[name]) == used == 18


@pytest.mark.parametrize(
    "more",
    [{}, {"stop": "is 5 größ"}, {"stop": "It is 5 grüner"}, {"skip_special_tokens": False},
     {"return_tokens_as_token_ids": True}],
)  # fmt: skip
def test_offsets_point_into_the_text(more: dict[str, Any]) -> None:
    """Whole and streamed: where a token's text begins, or at the end if it was cut off."""
    tokenizer = fake_tokenizer()
    tokens = tokenizer.encode("It is 5 größer 🙂</s>. ", add_special_tokens=False)
    body = {"prompt": [5], "max_tokens": len(tokens), "temperature": 0, "logprobs": 1}
    body |= {"ignore_eos": True, "return_token_ids": True} | more
    with served(scripted(1, tokens)) as (server, _), server.client() as client:
        (whole,) = client.post("/v1/completions", json=body).json()["choices"]
        *told, _ = events(client.post("/v1/completions", json=body | {"stream": True}))
    text, offsets = whole["text"], whole["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    raw = b""
    for id, offset in zip(whole["token_ids"], offsets, strict=True):
        shown = [id] if more.get("skip_special_tokens") is False else []
        assert offset == min(len(text), len(raw.decode("utf-8", "ignore")))
        raw += tokenizer.decode_token(id)
        raw += (tokenizer.find_special_name(id) or "").encode() if shown else b""
    parts = [e["choices"][0]["logprobs"] for e in told if e["choices"][0]["logprobs"]]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values, name
    by_ids = [text.startswith("token_id:") for text in whole["logprobs"]["tokens"]]
    assert by_ids == ["return_tokens_as_token_ids" in more] * len(by_ids)


@pytest.mark.parametrize(
    ("echo", "prompt", "starts"),
    [("def größer", "def größer", None), ("<s>def", "<s>def", [0, 3]),
     ("def", [0, *fake_tokenizer().encode("def", add_special_tokens=False)], [0, 0])],
)  # fmt: skip
def test_offsets_into_a_prompt_that_is_repeated(
    echo: str, prompt: str | list[int], starts: list[int] | None
) -> None:
    tokenizer = fake_tokenizer()
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    told = tuple(TokenLogprobs(id, -1.0, ()) for id in ids)
    choice = AnswerChoice(0, ids, SamplingParams(), echo=echo, prompt_logprobs=told[1:])
    choice.take(
        Chunk((Span("ab", False),), (7, 8), (False, False), logprobs=told[:2], starts=(0, 1))
    )
    answer = CompletionAnswer("m", TEXT, [choice], tokenizer)
    (full_body,) = answer.make_full_body()["choices"]
    *offsets, one, two = full_body["logprobs"]["text_offset"]
    assert (one, two) == (len(echo), len(echo) + 1)
    assert offsets[: len(starts or ())] == (starts or [])
    for id, offset in zip(ids, offsets, strict=True):
        assert echo.startswith(tokenizer.text([id]).rstrip("\ufffd"), offset)


def test_the_chosen_token_is_among_the_likeliest() -> None:
    chosen = TokenLogprobs(70, -5.0, ((71, -0.5), (72, -1.0)))
    first = TokenLogprobs(71, -0.5, ((71, -0.5), (72, -1.0)))
    tokenizer = fake_tokenizer()
    name = {id: tokenizer.text([id]) for id in (70, 71, 72)}

    def logprobs(*tokens: TokenLogprobs) -> tuple[list[Any], Any]:
        chat: Any = ChatAnswer("m", CHAT, [], tokenizer)._make_logprobs(tokens)
        tops = [[top["token"] for top in entry["top_logprobs"]] for entry in chat["content"]]
        text = CompletionAnswer("m", TEXT, [], tokenizer)
        return tops, text._make_logprobs(tokens, range(len(tokens)), 2)["top_logprobs"]

    assert logprobs(chosen, first) == (
        [[name[71], name[72], name[70]], [name[71], name[72]]],
        [{name[70]: -5.0, name[71]: -0.5, name[72]: -1.0}, {name[71]: -0.5, name[72]: -1.0}],
    )
    assert logprobs(TokenLogprobs(70, -5.0, ())) == ([[]], [{name[70]: -5.0}])
