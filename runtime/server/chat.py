"""POST /v1/chat/completions: messages become a prompt, chunks become messages."""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.requests.request import Chunk, TokenLogprobs
from mtpbuild.runtime.server.answering import ANSWERS, answer
from mtpbuild.runtime.server.answers import (
    Answer,
    AnswerChoice,
    Json,
    Pieces,
    clamp_logprob,
    seed_choices,
)
from mtpbuild.runtime.server.bodies import BodyRoute
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.params import check_refused, read_params, translate_errors
from mtpbuild.runtime.server.protocol import ChatBody
from mtpbuild.runtime.text.chat_template import ChatOptions
from mtpbuild.runtime.tool_calls.tool_use import read_tool_use

router = APIRouter(route_class=BodyRoute)
T = TypeVar("T", bound=Answer)
DELTA_FIELDS = {"content": ["content"], "reasoning": ["reasoning_content", "reasoning"]}


@router.post("/v1/chat/completions", responses=ANSWERS)
async def continue_chat(body: ChatBody, request: Request) -> Response:
    """Continue a conversation."""
    return answer(request, body, partial(read_chat, ChatAnswer))


def read_chat(kind: type[T], engine: Engine, settings: ServerOptions, body: ChatBody) -> T:
    """Create an answer of class `kind` for a chat's body; ApiError names the wrong field."""
    with translate_errors():
        tool_use = read_tool_use(
            engine.tokenizer,
            tools=_dump_tools(body),
            tool_choice=body.tool_choice,
            parallel_tool_calls=body.parallel_tool_calls,
            tool_call_parser=settings.tool_call_parser,
        )
    ids = encode_prompt(engine, body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    params = read_params(
        engine,
        settings.defaults,
        body,
        len(ids),
        calls=tool_use.forced if tool_use else None,
        stop_in_thought=bool(body.stop_in_thought),
    )
    params = engine.answer_params(params, tool_use, split_thought=not settings.no_thinking_split)
    choices = [
        AnswerChoice(index, ids, seeded, calls=tool_use.make_parser() if tool_use else None)
        for index, seeded in enumerate(seed_choices(params, body.n or 1))
    ]
    return kind(settings.served_model_name, body, choices, engine.tokenizer)


def _dump_tools(body: ChatBody) -> list[Json] | None:
    return None if body.tools is None else [t.model_dump(exclude_none=True) for t in body.tools]


def encode_prompt(engine: Engine, body: ChatBody) -> list[int]:
    """Return the token ids of a conversation; raises ApiError."""
    check_refused(body)
    options: ChatOptions = {
        "documents": body.documents,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    if body.reasoning_effort is not None:
        templates = engine.tokenizer.chat_template if engine.tokenizer else None
        if templates is None or "reasoning_effort" not in templates.text:
            message = "reasoning_effort is not supported: this model's template does not read it"
            raise ApiError(400, message, "reasoning_effort")
        kwargs = {"reasoning_effort": body.reasoning_effort} | (body.chat_template_kwargs or {})
        options["chat_template_kwargs"] = kwargs
    if body.tools and body.tool_choice != "none":
        options["tools"] = _dump_tools(body)
    with translate_errors("messages"):
        prompt = engine.chat_prompt(body.messages, **options)
        return engine.token_ids(prompt, add_special_tokens=bool(body.add_special_tokens))


class ChatAnswer(Answer):
    """An answer as chat messages."""

    kind = "chatcmpl"
    event_kind = "chat.completion.chunk"
    body: ChatBody

    def make_full_body(self) -> Json:
        choices = [self._make_choice(choice) for choice in self.choices]
        whole = self.make_openai_object("chat.completion", choices) | self._make_prompt_ids()
        return whole | self.make_prompt_logprobs_field(self.choices[0]) | self.make_usage_fields()

    def _make_prompt_ids(self) -> Json:
        return {"prompt_token_ids": self.choices[0].ids} if self.body.return_token_ids else {}

    def _make_choice(self, choice: AnswerChoice) -> Json:
        content = choice.join_text("content")
        calls = choice.tool_calls
        nullable = calls or choice.has_cut_call or choice.params.split_thought
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if nullable and not content:
            message["content"] = None
        thought = choice.join_text("reasoning")
        if thought and self.body.include_reasoning is not False:
            message |= {"reasoning_content": thought, "reasoning": thought}
        if calls:
            message["tool_calls"] = calls
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._make_logprobs(choice.logprobs),
            **choice.finish_fields,
        } | ({"token_ids": choice.token_ids} if self.body.return_token_ids else {})

    def make_opening_event(self, choice: AnswerChoice) -> Json:
        opening_event = self._make_event(choice, {"role": "assistant", "content": ""})
        return opening_event | (self._make_prompt_ids() if choice.index == 0 else {})

    def event(self, choice: AnswerChoice, chunk: Chunk, pieces: Pieces) -> Json | None:
        delta: Json = {}
        if calls := choice.call_deltas(pieces):
            delta["tool_calls"] = calls
        for piece in pieces:
            hidden = piece.kind == "reasoning" and self.body.include_reasoning is False
            for name in () if hidden else DELTA_FIELDS.get(piece.kind, ()):
                delta[name] = delta.get(name, "") + piece.text
        fields: Json = {}
        if logprobs := self._make_logprobs(chunk.logprobs or ()):
            fields["logprobs"] = logprobs
        if chunk.finish_reason is not None:
            fields |= choice.finish_fields
        if self.body.return_token_ids:
            spans = [[piece.text, piece.from_draft, piece.kind] for piece in pieces]
            fields |= {"token_ids": list(chunk.token_ids), "spans": spans}
        return self._make_event(choice, delta, fields) if delta or fields else None

    def _make_event(self, choice: AnswerChoice, delta: Json, fields: Json | None = None) -> Json:
        head = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.make_openai_object(self.event_kind, [head | (fields or {})])

    def _make_logprobs(self, tokens: Sequence[TokenLogprobs]) -> Json | None:
        """Return the log-probabilities of tokens; None if the client does not ask for them."""

        def entry(id: int, logprob: float) -> Json:
            text, raw = self.decode_for_logprobs(id)
            return {"token": text, "logprob": clamp_logprob(logprob), "bytes": raw}

        if not self.body.logprobs:
            return None
        content = []
        for token in tokens:
            chosen = entry(token.token_id, token.logprob)
            top = [entry(*pair) for pair in token.top]
            if top and token.token_id not in (id for id, _ in token.top):
                top.append(chosen)
            content.append(chosen | {"top_logprobs": top})
        return {"content": content}
